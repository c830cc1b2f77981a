"""Joined decoding: a generation has the tokens that it has alone, whenever it begins and whatever shares its passes."""

import gc
import shutil
import weakref
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.decoding.loop import State
from lantern.decoding.rounds import Joint
from lantern.drafters.windows import TRIAL
from lantern.engines.engine import engine
from lantern.generation.generator import Decoder
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, wide_target
from tests.tiny_decoder import CONDITION, tiny_decoder

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = pytest.param("cpu", marks=needs_compiler)
TARGET = wide_target()
LONG = wide_target(block_size=36)  # more steps than the trial of a window has
EAGLE = tiny_eagle(TARGET)
KEYS = [(9, 0), (9, 1), (4, 7), (2, 3)]
SAMPLING, OTHER = Sampling(guidance=3, top_k=12), Sampling(guidance=6, temperature=0.7, top_k=5)
SAMPLINGS = [SAMPLING, SAMPLING, OTHER, Sampling(guidance=1)]  # the last shares no pass with the others
# plain, a window, a static and a dynamic tree, a rejection with noise of its own, relaxations with theirs
NAMES = ["plain", "gumbel-jacobi", "eagle1", "eagle2", "eagle1-rejection", "sjd", "lantern", "bounded-window", "eagle3"]
# those with fused steps, and one without
ON_CPU = ["plain", "gumbel-jacobi", "bounded-window", "eagle1", "parallelspec", "lantern", "eagle2"]


def decoder(
    name: str, sampling: Sampling = SAMPLING, kind: str = "eager", target: Transformer = TARGET, **settings: Any
) -> Decoder:
    module = EAGLE if target is TARGET else None
    return tiny_decoder(name, target, sampling, module=module, engine=engine(kind), **settings)


def begun(made: Decoder, i: int) -> State:
    return made.begin(CONDITION.select([i % 3]), keys=[KEYS[i]], is_joined=True)


def joined(made: Decoder) -> Joint:
    return Joint(made.engine.group, made.engine.drive)


def alone(made: Decoder, i: int) -> Generation:
    return made.generate(CONDITION.select([i % 3]), keys=[KEYS[i]])


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "eager") for name in NAMES), *(pytest.param(name, "cpu", marks=needs_compiler) for name in ON_CPU)],
)
def test_tokens_are_those_of_the_generation_alone(name: str, kind: str) -> None:
    """One begins at every second step, the second leaves unfinished, and their order is another at each step."""
    small: dict[str, Any] = {"nodes": 8, "width": 3, "depth": 2} if name == "eagle2" else {}
    lots = Random(0)
    decoders = [decoder(name, sampling, kind, **small) for sampling in SAMPLINGS]
    joint, running, made = joined(decoders[0]), dict[int, State](), dict[int, Tensor]()
    for number in count():
        if number in (0, 2, 4, 6):
            running[number // 2] = begun(decoders[number // 2], number // 2)
        elif not running:
            break
        if number == 4:
            del running[1]
        joint.take(lots.sample(list(running.values()), len(running)))
        for i in [i for i, state in running.items() if state.is_done()]:
            made[i] = running.pop(i).result().tokens[0]
    assert sorted(made) == [0, 2, 3]
    for i, tokens in made.items():
        assert torch.equal(tokens, alone(decoder(name, SAMPLINGS[i], kind, **small), i).tokens[0])


@pytest.mark.parametrize("kind", ["eager", CPU])
@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1", "eagle2"])
def test_samplings_share_passes_and_memory_is_freed_without_the_garbage_collector(name: str, kind: str) -> None:
    one = decoder(name, kind=kind)
    joint = joined(one)
    running = [begun(one, 0), begun(decoder(name, OTHER, kind), 1)]
    left = [weakref.ref(state) for state in running]
    gc.disable()
    try:
        joint.take(running)
        joint.take(running)
        caches = [weakref.ref(known.cache) for _, known in joint._groups.values()]
        assert len(caches) == 1
        del running, joint
        assert [one() for one in (*left, *caches)] == [None] * (len(left) + len(caches))
    finally:
        gc.enable()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("eagle1", {}),
        ("lantern++", {}),
        ("gumbel-jacobi", {"window": 4}),
        ("gumbel-jacobi", {"window": 4, "least": 3.9}),
    ],
    ids=str,
)
def test_steps_of_one_call_end_when_a_generation_is_complete(name: str, options: dict[str, Any]) -> None:
    """The last window is given up after its trial, in which each call takes one step."""
    made = {i: decoder(name, kind="cpu", target=LONG, **options) for i in range(3)}
    whole = {i: alone(one, i) for i, one in made.items()}
    joint, running, calls = joined(made[0]), {i: begun(one, i) for i, one in made.items()}, 0
    while running:
        joint.take(list(running.values()), patience=60.0)
        calls += 1
        ended = [i for i, state in running.items() if state.is_done()]
        for i in ended:
            found = running.pop(i).result()
            assert torch.equal(found.tokens, whole[i].tokens) and torch.equal(found.steps, whole[i].steps)
    assert calls <= 3 + (TRIAL if "least" in options else 0)


@needs_compiler
def test_a_generation_whose_window_is_given_up_leaves_before_another_takes_its_place() -> None:
    made = [decoder("gumbel-jacobi", kind="cpu", target=LONG, window=4, least=3.9) for _ in range(3)]
    expected = [alone(one, i).tokens[0] for i, one in enumerate(made)]
    joint, first, second = joined(made[0]), begun(made[0], 0), begun(made[1], 1)
    joint.take([first])
    for _ in range(TRIAL - 1):
        joint.take([second, first])
    running = [second, begun(made[2], 2), first]  # the first one decodes plainly from here on
    while not all(state.is_done() for state in running):
        joint.take([state for state in running if not state.is_done()])
    found = [running[number].result().tokens[0] for number in (2, 0, 1)]
    assert all(torch.equal(tokens, own) for tokens, own in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_a_generation_that_keeps_tokens_joins_one_without(name: str) -> None:
    built, forced = decoder(name), torch.full((1, 16), -1)
    joint = joined(built)
    forced[:, :11] = torch.arange(11)
    condition = CONDITION.select([1])
    free = begun(built, 0)
    joint.take([free])
    again = decoder(name)
    kept = again.begin(condition, keys=KEYS[1:2], forced=forced, is_joined=True)
    assert kept.step.counts.tolist() == [11] and torch.equal(kept.step.tokens, forced[:, :11])
    running = [free, kept]
    while running:
        joint.take(running)
        running = [one for one in running if not one.is_done()]
    made = kept.result()
    expected = decoder("plain").generate(condition, keys=KEYS[1:2], forced=forced).tokens
    # the prompt, the first ten tokens, and at most one for each of the last five
    assert torch.equal(made.tokens, expected) and int(made.steps) <= 7
    assert torch.equal(free.result().tokens, alone(decoder(name), 0).tokens)
