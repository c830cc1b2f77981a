"""Waves: a generation has the tokens and figures that it has alone, whenever it begins and whoever shares its batch."""

from itertools import count
from random import Random
from typing import Any
from weakref import ref

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation
from lantern.decoding.loop import State
from lantern.decoding.rounds import Joint
from lantern.decoding.wave import WAVES, Wave
from lantern.engines.cuda.graphs import forget_all
from lantern.engines.engine import EAGER
from lantern.generation.generator import Decoder
from lantern.methods import METHODS
from tests import tiny_transformers
from tests.engines.cuda.claimed import Rehearsed, RehearsedEngine
from tests.tiny import wide_target
from tests.tiny_decoder import CONDITION, small_method, tiny_decoder

TARGET = wide_target()
SAMPLING, OTHER = Sampling(guidance=3, top_k=12), Sampling(guidance=5)
# of one form: images of one wave
SAMPLINGS = [Sampling(3, 1, 12, 0.9), Sampling(2, 0.8, 9, 0.8), Sampling(5.5, 1.3, 15, 0.97)]
KEYS = [(9, 0), (9, 1), (4, 7), (2, 3), (5, 5), (8, 1), (6, 2)]
# specmquant-paper's inner rounds are counted by the host
NAMES = [name for name in METHODS if name not in ("auto", "zipar", "pjd", "specmquant-paper")]
FEW = ("plain", "eagle1", "eagle1-traversal", "lantern++", "gumbel-jacobi", "sjd")
ENGINE = RehearsedEngine()


def decoder(name: str, sampling: Sampling = SAMPLING, engine: Any = ENGINE) -> Decoder:
    return tiny_decoder(small_method(name), TARGET, sampling, engine=engine)


def begun(made: Decoder, i: int, **how: Any) -> State:
    return made.begin(CONDITION.select([i % 3]), keys=[KEYS[i]], is_joined=True, **how)


def alone(name: str, i: int, sampling: Sampling = SAMPLING) -> Generation:
    return decoder(name, sampling, EAGER).generate(CONDITION.select([i % 3]), keys=[KEYS[i]])


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FEW)) for one in NAMES])
def test_tokens_and_figures_are_those_of_the_generation_alone(name: str) -> None:
    """One begins at each of six steps, the last where one has ended; the second leaves unfinished. Samplings are each
    image's own.
    """
    lots, decoders, waiting = Random(0), list[Decoder](), [*range(len(KEYS))]
    joint, running, made, waves = Joint(ENGINE.group, ENGINE.drive), dict[int, State](), dict[int, Any](), set[Wave]()
    for step in count():
        free = [one for one in decoders if one._kept not in running.values()]
        if waiting and (step < 6 or free):
            decoders += [] if free else [decoder(name, SAMPLINGS[0])]
            one, number = (free or decoders)[-1], waiting.pop(0)
            kept, running[number] = one._kept, begun(one, number, sampling=SAMPLINGS[number % 3])
            assert kept in (None, running[number])
        elif not running:
            break
        if step == 3:
            del running[1]
        joint.take(lots.sample(list(running.values()), len(running)))
        waves |= {rounds for _, rounds in joint._groups.values() if isinstance(rounds, Wave)}
        for i in [i for i, state in running.items() if state.is_done()]:
            made[i] = running.pop(i).result()
    assert sorted(made) == [0, 2, 3, 4, 5, 6] and {2, 4} <= {wave.size for wave in waves}
    for i, found in made.items():
        expected = alone(name, i, SAMPLINGS[i % 3])
        assert torch.equal(found.tokens, expected.tokens) and bool(found.is_finite.all())
        if name != "plain":  # alone it counts its steps in another way
            assert torch.equal(found.steps, expected.steps) and torch.equal(found.accepted, expected.accepted)
        assert torch.allclose(found.total_variation, expected.total_variation, atol=1e-4)


def test_a_wave_is_of_one_method_and_sampling_and_of_no_given_tokens() -> None:
    given = torch.full((1, 16), -1)
    given[:, 3] = 5
    made = [decoder("eagle1"), decoder("eagle1"), decoder("eagle1", OTHER), decoder("medusa"), decoder("eagle1")]
    states = [begun(one, i, forced=given if i == 4 else None) for i, one in enumerate(made)]
    joint = Joint(ENGINE.group, ENGINE.drive)
    joint.take(states)
    assert [len(members) for members, _ in joint._groups.values()] == [2, 1, 1, 1]
    decoders, two = [decoder("plain") for _ in range(4)], {"keys": KEYS[:2], "is_joined": True}
    for one in decoders[2:]:
        one.generate(CONDITION, keys=KEYS[:3])
    states = [one.begin(CONDITION.select([0, 1]), **two) for one in decoders[:2]]
    states += [begun(one, 0) for one in (*decoders[2:], decoder("zipar"), decoder("zipar"))]
    assert len(set(map(ENGINE.group, states))) == 6


def test_the_graph_of_a_wave_serves_later_waves_until_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "captured", 0)
    decoders, captured = [decoder("gumbel-jacobi") for _ in range(3)], []
    for turn in range(3):
        joint = Joint(ENGINE.group, ENGINE.drive)
        states = [begun(one, 2 * turn % 5 + i % 2) for i, one in enumerate(decoders)]
        while not all(state.is_done() for state in states):
            joint.take(states)
        for i, state in enumerate(states):
            assert torch.equal(state.result().tokens, alone("plain", 2 * turn % 5 + i % 2).tokens)
        captured.append(Rehearsed.captured)
    assert captured == [1, 1, 1]
    wave = ref(WAVES[states[0]])
    del joint
    assert wave() is not None
    forget_all()
    assert wave() is None


def test_a_wave_reads_weights_as_they_are_and_prompts_of_its_length() -> None:
    target: Any = tiny_transformers.llama(side=4)
    tokens = torch.randint(1, 32, (1, 2, 40), generator=torch.Generator().manual_seed(0))
    *made, eager = (tiny_decoder("plain", target, SAMPLING, engine=one) for one in (ENGINE, ENGINE, EAGER))
    joint = Joint(ENGINE.group, ENGINE.drive)
    for turn, length in enumerate((6, 7, 40)):
        if turn == 1:
            target.body.norm.weight.data = target.body.norm.weight.flip(0)
        some = tokens[..., :length]
        condition = Condition(tokens=some, mask=torch.ones_like(some, dtype=torch.bool))
        states = [one.begin(condition, keys=[KEYS[i]], is_joined=True) for i, one in enumerate(made)]
        while not all(state.is_done() for state in states):
            joint.take(states)
        for i, state in enumerate(states):
            assert torch.equal(state.result().tokens, eager.generate(condition, keys=[KEYS[i]]).tokens)
