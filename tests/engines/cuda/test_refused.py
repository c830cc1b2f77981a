"""What a GPU may refuse: a capture, a kernel, memory for many graphs."""

import gc
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch

from lantern.core.types import Step
from lantern.decoding.loop import Programs
from lantern.engines.cuda import graphs
from lantern.engines.cuda.graphs import Captured, GraphedStepper
from lantern.engines.prepared import on_device
from tests.engines.cuda.replay import Rehearsed
from tests.engines.cuda.test_reuse import REHEARSED, counted, decoder_of
from tests.tiny import tiny_condition, tiny_target

counted = counted
CONDITION, KEYS = tiny_condition((4, 2)), [(9, 0), (9, 1)]


class Refused(GraphedStepper):
    """A stepper whose capture fails after the step has replaced its tensors."""

    tried = 0

    def join(self) -> Captured | None:
        return None

    def capture(self) -> Captured:
        type(self).tried += 1
        stepper: Any = self.stepper
        work = stepper.work

        def broken() -> Step:
            work()
            raise RuntimeError("operation not permitted when stream is capturing")

        stepper.work = broken
        try:
            self.held_work()
        finally:
            del stepper.work
        raise AssertionError


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_steps_go_on_without_a_graph_if_none_can_be_captured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder = decoder_of(name, tiny_target())
    expected = decoder.generate(CONDITION, keys=KEYS)
    Refused.tried = 0
    made = decoder.generate(CONDITION, keys=KEYS, programs=Programs(wrap=Refused, may_look=False))
    assert Refused.tried == 1 and torch.equal(made.codes, expected.codes)
    assert torch.equal(made.accepted, expected.accepted) and "no CUDA graph could be captured" in caplog.text


def test_graphs_that_hold_too_much_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(graphs, "most_bytes", lambda: 1.0)
    for guidance in (2.0, 3.0):
        decoder_of("plain", target, guidance).generate(CONDITION, keys=KEYS, programs=REHEARSED)
    assert Rehearsed.captured == 2 and len(graphs._GRAPHS[target]) == 1 and graphs._GRAPHS[target][0].nbytes > 0


def test_a_graph_in_use_is_dropped_last(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    decoders = [decoder_of("plain", target, guidance) for guidance in (2.0, 3.0, 4.0)]
    for number in (0, 1, 0, 2, 0):
        decoders[number].generate(CONDITION, keys=KEYS, programs=REHEARSED)
    assert (Rehearsed.captured, Rehearsed.joined) == (3, 2)


def test_graphs_of_earlier_weights_are_dropped() -> None:
    target = tiny_target()
    decoder = decoder_of("plain", target)
    for _ in range(2):
        decoder.generate(CONDITION, keys=KEYS, programs=REHEARSED)
        target.output.weight.data = target.output.weight.data.clone()
    assert Rehearsed.captured == 2 and len(graphs._GRAPHS[target]) == 1


def test_a_graph_does_not_keep_a_target_alive() -> None:
    target = tiny_target()
    decoder_of("eagle1", target).generate(CONDITION, keys=KEYS, programs=REHEARSED)
    alive = ref(target)
    assert len(graphs._GRAPHS[target]) == 1
    del target
    gc.collect()
    assert alive() is None


def test_kernels_and_graphs_run_on_the_gpu_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(taken.append(device)))
    for device in ("cuda:1", "cuda:0", "cpu"):
        with on_device(torch.device(device)):
            pass
    assert taken == [torch.device("cuda", 1), torch.device("cuda", 0)]
