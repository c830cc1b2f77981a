"""Captured steps, simulated without a GPU: state stays in its memory and the codes are the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lantern.core.types import Step
from lantern.decoding.loop import Programs
from lantern.engines.cuda import graphs
from lantern.engines.cuda.graphs import Captured, GraphedStepper
from lantern.engines.cuda.state import State
from lantern.generation.decoder import Decoder
from lantern.methods import METHODS
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION, KEYS, TARGET, small_method, tiny_decoder


class Rehearsed(GraphedStepper):
    """Runs the step again where a GPU would replay it, and checks that its memory stayed in place."""

    replays = 0

    def join(self) -> None:
        """No graph is kept."""

    def capture(self) -> Captured:
        type(self).replays = -1  # this capture runs the step, a graph's does not
        return Captured(None, self.held_work(), State(()), ())

    def replay(self, captured: Captured) -> None:
        type(self).replays += 1
        if self.replays == 0:
            return
        before = self.places()
        captured.step = self.held_work()
        assert self.places() == before

    def places(self) -> dict[str, list[int]]:
        found = {name: value for owner in self.state_holders for name, value in vars(owner).items()}
        return {name: [tensor.data_ptr() for tensor in graphs.tensors(value)] for name, value in found.items()}


REHEARSED, GRAPHED = Programs(wrap=Rehearsed, may_look=False), Programs(wrap=GraphedStepper)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "replays", 0)


def parts_of(name: str) -> Decoder:
    return tiny_decoder(small_method(name))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.made.driver is None])
def test_held_steps_give_the_same_codes(name: str, rehearsed: None) -> None:
    parts = parts_of(name)
    expected = parts.generate(CONDITION, keys=KEYS)
    made = parts.generate(CONDITION, keys=KEYS, programs=REHEARSED)
    assert Rehearsed.replays > 0
    assert torch.equal(made.codes, expected.codes) and torch.equal(made.passes, expected.passes)
    assert torch.equal(made.accepted, expected.accepted)
    assert made.is_finite is not None and made.is_finite.tolist() == [True, True, True]


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_reported_steps_are_not_overwritten_by_the_next_replay(name: str, rehearsed: None) -> None:
    parts, reported = parts_of(name), list[list[Step]]()
    for programs in (Programs(), REHEARSED):
        reported.append([])
        how: dict[str, Any] = {"programs": programs, "callback": reported[-1].append}
        made = parts.generate(CONDITION, keys=KEYS, keep_steps=True, **how)
        for steps in (made.steps, reported[-1]):
            assert [step.index for step in steps] == list(range(len(reported[-1])))
        reported.append(made.steps)
    assert Rehearsed.replays > 0
    for eager, graphed in (*zip(reported[0], reported[2], strict=True), *zip(reported[1], reported[3], strict=True)):
        for field in ("start", "counts", "codes"):
            assert torch.equal(getattr(eager, field), getattr(graphed, field))


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_captured_steps_are_not_timed_inside(name: str, rehearsed: None) -> None:
    parts = parts_of(name)
    eager = set(parts.generate(CONDITION, keys=KEYS, is_timed=True).seconds)
    graphed = parts.generate(CONDITION, keys=KEYS, is_timed=True, programs=REHEARSED).seconds
    assert set(graphed) == eager | {"capture", "replay"} and min(graphed.values()) >= 0


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_nan_logits_in_a_replay_are_detected(name: str, rehearsed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, score, passes = parts_of(name), TARGET.forward, [0]

    def spoilt(*args: object, **named: object) -> object:
        scores = score(*args, **named)  # type: ignore[arg-type]
        passes[0] += 1
        if passes[0] == graphs.WARM_STEPS + 3:
            scores.logits[2] = torch.nan
        return scores

    monkeypatch.setattr(TARGET, "forward", spoilt)
    is_finite = parts.generate(CONDITION, keys=KEYS, programs=REHEARSED).is_finite
    assert Rehearsed.replays > 0 and is_finite is not None and is_finite.tolist() == [True, False, True]


def test_step_that_changes_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be captured"):
        list(graphs.pairs((torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(4))))


@pytest.fixture
def sync_allowed() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("is_graphed", [False, True])
def test_plain_decoding_on_cuda_does_not_synchronize(is_graphed: bool, sync_allowed: None) -> None:
    target = tiny_target(block_size=64).cuda()
    parts = tiny_decoder("plain", target)
    expected = parts.generate(CONDITION, keys=KEYS).codes

    def watch(step: Step) -> None:
        torch.cuda.set_sync_debug_mode("error" if 0 < step.index < 63 else "default")

    assert torch.equal(
        parts.generate(CONDITION, keys=KEYS, programs=GRAPHED if is_graphed else Programs(), callback=watch).codes,
        expected,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "eagle1", "eagle1-rejection", "gumbel-jacobi"])
def test_captured_steps_give_the_same_codes(name: str) -> None:
    target = tiny_target(block_size=64).cuda()
    parts = tiny_decoder(name, target)
    expected = parts.generate(CONDITION, keys=KEYS).codes
    assert torch.equal(parts.generate(CONDITION, keys=KEYS, programs=GRAPHED).codes, expected)
    seconds = parts.generate(CONDITION, keys=KEYS, programs=GRAPHED, is_timed=True).seconds
    assert "replay" in seconds and "capture" not in seconds  # the graph of the generation before
