"""The host never waits for the device within a step, and reads the progress at most once between steps."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.loop import State
from lantern.decoding.statistics import Readback
from lantern.generation.generator import Decoder
from lantern.methods import METHODS
from tests.proof.readbacks import Readbacks
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import BLIND, shrunk, tiny_decoder

CONDITION = tiny_condition((4, 1, 6, 3))
KEYS = [(5, i) for i in range(4)]
X, IS_BIG = torch.tensor([3.0, 1.0]), torch.tensor([True, False])


def put(values: Tensor) -> None:
    values[IS_BIG] = 1.0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 1),
        lambda x: 1 if x[0] else 0,
        lambda x: [0, 1, 2, 3][x[0].long()],
        lambda x: torch.is_nonzero(x[0]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.argwhere(x),
        lambda x: torch.where(x > 1),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x.masked_select(IS_BIG),
        lambda x: x[IS_BIG],
        lambda x: put(x.clone()),
        lambda x: x.unique(),
        lambda x: x.unique(dim=0),
        lambda x: x.unique_consecutive(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor([1.0, 2.0]),
    ],
)
def test_every_synchronising_call_is_detected(wait: Callable[[Tensor], object]) -> None:
    with Readbacks() as readbacks:
        wait(X)
    assert len(readbacks.seen) >= 1


def test_asynchronous_calls_are_not_reported() -> None:
    with Readbacks() as readbacks:
        torch.where(IS_BIG, X, 0.0).repeat_interleave(2).masked_fill(torch.ones(4, dtype=torch.bool), 1.0)
        X[torch.arange(2)].index_select(0, torch.zeros(1, dtype=torch.long)).to(torch.float64)
        X.repeat_interleave(X.long(), output_size=4)
    assert readbacks.seen == []


def parts_of(name: str, device: str = "cpu") -> Decoder:
    method = METHODS[name]
    method = method.with_options(tree="0 1 0.0 1.0") if method.tree else shrunk(method)
    sampling = Sampling(guidance=3, temperature=0.9, top_k=20, top_p=0.95)
    return tiny_decoder(method, tiny_target(block_size=9, n_layer=1).to(device), sampling, engine=BLIND)


class Watch:
    """The waits of each step, and how often the loop read the progress from the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readbacks, self.marks, self.requested = Readbacks(), list[int](), 0
        read, is_done = Readback.read, State.is_done

        def counted(asking: Readback, known: Tensor) -> int | None:
            self.requested += 1
            return read(asking, known)

        def marked(run: State) -> bool:
            self.mark()
            return is_done(run)

        monkeypatch.setattr(Readback, "read", counted)
        monkeypatch.setattr(State, "is_done", marked)

    def mark(self, step: Step | None = None) -> None:
        """End a step."""
        self.marks.append(len(self.readbacks.seen))


# The host counts the inner rounds of specmquant-paper.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "specmquant-paper"])
def test_host_reads_once_between_steps_and_never_within(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(name)
    parts.generate(CONDITION, keys=KEYS)  # builds the constants of the tree
    watch = Watch(monkeypatch)
    with watch.readbacks:
        made = parts.generate(CONDITION, keys=KEYS, callback=watch.mark if parts.drafter is None else None)
    in_steps = watch.readbacks.seen[watch.marks[0] :]
    assert [wait for wait in in_steps if "# sync" not in wait.line] == []
    assert len(in_steps) == watch.requested
    # Where the size of a tree changes, drafting starts by reading the result of the last step.
    reads = 1 + getattr(parts.drafter, "needs_host", False)
    assert all(after - before <= reads for before, after in pairwise(watch.marks))
    assert len(watch.marks) == int(made.steps.max()) if parts.drafter is None else watch.requested >= 1


@pytest.fixture
def strict_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make waiting an error between the first and the last check of the progress, except during a check."""
    is_done = State.is_done

    def requested(self: State) -> bool:
        torch.cuda.set_sync_debug_mode("default")
        done = is_done(self)
        torch.cuda.set_sync_debug_mode("default" if done else "error")
        return done

    monkeypatch.setattr(State, "is_done", requested)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.is_plain])
def test_gpu_is_never_waited_for_within_a_step(name: str, strict_gpu: None) -> None:
    parts = parts_of(name, "cuda")
    for _ in range(2):
        made = parts.generate(CONDITION, keys=KEYS)
    assert made.tokens.shape == (4, 9)


@pytest.mark.gpu
def test_synchronisation_debug_mode_raises() -> None:
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
