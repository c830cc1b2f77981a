"""Captured steps, simulated without a GPU: state stays in its memory and the codes are the same."""

from collections.abc import Iterator

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.loop import Programs
from lantern.engines.cuda import graphs
from lantern.engines.cuda.graphs import Captured, GraphedStepper
from lantern.engines.cuda.state import State
from lantern.methods.registry import METHODS, Decoder, build_decoder
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_parts

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
CODEBOOK = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))


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
    method = METHODS[name]
    method = method.with_options(k=10) if "k" in method.settings else method
    small = {"window": 4, "tree": "chain_2", "adaptive": False}
    method = method.with_options(**{option: value for option, value in small.items() if option in method.options})
    return build_decoder(
        method,
        TARGET,
        sampling=Sampling(guidance=3),
        drafter_module=tiny_eagle(TARGET),
        add_ons=tiny_parts(TARGET),
        neighbours=proximity_table(CODEBOOK, 23),
        codebook=CODEBOOK,
    )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.spec.loop is None])
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
    for is_graphed in (False, True):
        reported.append([])
        made = parts.generate(
            CONDITION,
            keys=KEYS,
            programs=REHEARSED if is_graphed else Programs(),
            callback=reported[-1].append,
            keep_steps=True,
        )
        assert (
            [step.index for step in made.steps]
            == [step.index for step in reported[-1]]
            == list(range(len(reported[-1])))
        )
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
    parts = build_decoder("plain", target, sampling=Sampling())
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
    parts = build_decoder(
        METHODS[name],
        target,
        sampling=Sampling(),
        drafter_module=tiny_eagle(target).cuda(),
        add_ons={name: part.cuda() for name, part in tiny_parts(target).items()},
    )
    expected = parts.generate(CONDITION, keys=KEYS).codes
    assert torch.equal(parts.generate(CONDITION, keys=KEYS, programs=GRAPHED).codes, expected)
    seconds = parts.generate(CONDITION, keys=KEYS, programs=GRAPHED, is_timed=True).seconds
    assert "replay" in seconds and "capture" not in seconds  # the graph of the generation before
