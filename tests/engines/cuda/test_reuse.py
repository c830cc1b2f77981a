"""Rounds are replayed: later generations of a decoder have their own prompts, seeds and noise in the same memory."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.cuda import graphs
from lantern.engines.engine import EAGER
from lantern.generation.decoder import Decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from tests.engines.cuda.replay import Rehearsed, RehearsedEngine
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

SHORT = ("plain", "gumbel-jacobi", "eagle1", "eagle2", "lantern++", "sjd")
# Parallel rows and the inner rounds of specmquant-paper, which the host counts, are not captured.
CAPTURED = [name for name in METHODS if name not in ("auto", "zipar", "pjd", "specmquant-paper")]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "replayed", 0)
    monkeypatch.setattr(Rehearsed, "captured", 0)


def decoder_of(name: str, target: Transformer, *, is_graphed: bool = True) -> Decoder:
    engine = RehearsedEngine() if is_graphed else EAGER
    return tiny_decoder(small_method(name), target, Sampling(guidance=3.0), engine=engine)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in CAPTURED]
)
def test_a_replayed_round_gives_the_tokens_of_other_prompts_and_seeds(name: str) -> None:
    target = tiny_target()
    eager, graphed = decoder_of(name, target, is_graphed=False), decoder_of(name, target)
    for number, (words, seed) in enumerate((((4, 2), 9), ((3, 5), 4))):
        condition = tiny_condition(words, seed=number)
        keys = [(seed, 0), (seed, 7)]
        expected, made = eager.generate(condition, keys=keys), graphed.generate(condition, keys=keys)
        assert torch.equal(made.tokens, expected.tokens) and torch.equal(made.steps, expected.steps)
        assert torch.equal(made.accepted, expected.accepted)
        assert torch.allclose(made.total_variation, expected.total_variation)
    assert Rehearsed.captured == 1 and Rehearsed.replayed > 1


def test_another_batch_is_captured_anew_and_tokens_given_are_replayed() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    eager, graphed = decoder_of("eagle1", target, is_graphed=False), decoder_of("eagle1", target)
    given = torch.full((2, 16), -1)
    given[:, 3], given[0, 9] = 5, 7
    for images, forced in ((2, None), (2, given), (2, given.roll(1, 1)), (1, None)):
        how = {"keys": [(3, image) for image in range(images)], "forced": forced}
        some = condition.select(list(range(images)))
        assert torch.equal(graphed.generate(some, **how).tokens, eager.generate(some, **how).tokens)  # type: ignore[arg-type]
    assert Rehearsed.captured == 3


def test_changed_weights_are_captured_anew() -> None:
    target, condition = tiny_target(), tiny_condition((4,))
    graphed = decoder_of("plain", target)
    graphed.generate(condition, keys=[(3, 0)])
    with torch.no_grad():
        target.output.weight.mul_(1.5)
    made = graphed.generate(condition, keys=[(3, 0)])
    expected = decoder_of("plain", target, is_graphed=False).generate(condition, keys=[(3, 0)])
    assert torch.equal(made.tokens, expected.tokens) and Rehearsed.captured == 2


def test_only_the_latest_graphs_are_kept_and_die_with_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.forget_all()
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
    target, condition = tiny_target(), tiny_condition((4,))
    decoders = [decoder_of("plain", target) for _ in range(5)]
    for decoder in decoders:
        decoder.generate(condition, keys=[(3, 0)])
    assert len(graphs._GRAPHS) == 3
    monkeypatch.setattr(graphs, "most_bytes", lambda: 1.0)
    decoders[0].generate(condition, keys=[(4, 0)])
    assert len(graphs._GRAPHS) == 1  # the latest stays, whatever its size
    decoders.clear()
    del decoder
    assert not graphs._GRAPHS


@pytest.mark.parametrize("name", ["plain", "eagle1", "gumbel-jacobi"])
def test_reported_steps_are_not_overwritten_by_the_next_replay(name: str) -> None:
    target, condition, keys = tiny_target(), tiny_condition((4, 2)), [(3, 0), (3, 1)]
    reported: list[list[Step]] = [[], []]
    kept = [
        decoder_of(name, target, is_graphed=is_graphed)
        .generate(condition, keys=keys, keep_history=True, callback=reported[is_graphed].append)
        .history
        for is_graphed in (False, True)
    ]
    assert Rehearsed.replayed > 1
    for eager, graphed in ((reported[0], reported[1]), (kept[0], kept[1])):
        for a, b in zip(eager, graphed, strict=True):
            assert a.index == b.index
            for field in ("start", "counts", "tokens"):
                assert torch.equal(getattr(a, field), getattr(b, field)), field
            if a.tree is not None and b.tree is not None:
                assert torch.equal(a.tree.tokens, b.tree.tokens)


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_nan_logits_in_a_replay_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, condition, keys = tiny_target(), tiny_condition((4, 2)), [(3, 0), (3, 1)]
    noise, score = torch.zeros(2), target.forward  # of each image

    def spoilt(*args: Any, **named: Any) -> Any:
        scores = score(*args, **named)
        scores.logits.add_(noise.repeat_interleave(len(scores.logits) // 2)[:, None, None])
        return scores

    def spoil(step: Step) -> None:
        noise[1] = torch.nan if step.index == 4 else 0.0

    monkeypatch.setattr(target, "forward", spoilt)
    made = decoder_of(name, target).generate(condition, keys=keys, callback=spoil)
    assert Rehearsed.replayed > 1 and made.is_finite is not None and made.is_finite.tolist() == [True, False]


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_captured_rounds_are_not_timed_inside(name: str) -> None:
    target, how = tiny_target(), {"keys": [(3, 0), (3, 1)], "is_timed": True}
    eager, graphed = (
        decoder_of(name, target, is_graphed=is_graphed).generate(tiny_condition((4, 2)), **how).seconds  # type: ignore[arg-type]
        for is_graphed in (False, True)
    )
    assert set(graphed) == set(eager) | {"capture", "replay"} and min(graphed.values()) >= 0
