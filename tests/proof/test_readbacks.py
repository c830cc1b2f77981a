"""The host never waits for the device within a step, and reads the progress at most once between steps."""

from itertools import pairwise

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.decoding.loop import State
from lantern.generation.generator import Decoder
from lantern.methods import METHODS
from tests.engines.cuda.claimed import claimed_cuda
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import BLIND, shrunk, tiny_decoder

CONDITION = tiny_condition((4, 1, 6, 3))
KEYS = [(5, i) for i in range(4)]
NAMES = [name for name in METHODS if name != "specmquant-paper"]  # whose inner rounds the host counts


def parts_of(name: str, device: str = "cpu") -> Decoder:
    method = METHODS[name]
    method = method.with_options(tree="0 1 0.0 1.0") if method.tree else shrunk(method)
    sampling = Sampling(guidance=3, temperature=0.9, top_k=20, top_p=0.95)
    return tiny_decoder(method, tiny_target(block_size=4, n_layer=1).to(device), sampling, engine=BLIND)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_nothing_within_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a claimed device, where the progress is copied without a wait."""
    marks, is_done = list[int](), State.is_done
    with claimed_cuda() as device:
        parts = parts_of(name, "cuda")
        parts.generate(CONDITION, keys=KEYS, callback=lambda step: step.index > 0)  # builds constants
        mark = lambda *_: marks.append(len(device.waits))  # noqa: E731
        monkeypatch.setattr(State, "is_done", lambda run: mark() or is_done(run))
        parts.generate(CONDITION, keys=KEYS, callback=mark if parts.drafter is None else None)
    waits = device.waits[marks[0] : marks[-1]]
    assert len(marks) > 2 and [wait for wait in waits if "# sync" not in wait] == []
    # Where the size of a tree changes, drafting starts by reading the result of the last step.
    reads = int(getattr(parts.drafter, "needs_host", False))
    assert all(after - before <= reads for before, after in pairwise(marks))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if not METHODS[name].is_plain])
def test_gpu_is_never_waited_for_within_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is an error between the first and the last check of the progress, except during a check."""
    parts, is_done = parts_of(name, "cuda"), State.is_done

    def requested(self: State) -> bool:
        torch.cuda.set_sync_debug_mode("default")
        done = is_done(self)
        torch.cuda.set_sync_debug_mode("default" if done else "error")
        return done

    monkeypatch.setattr(State, "is_done", requested)
    try:
        for _ in range(2):
            made = parts.generate(CONDITION, keys=KEYS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.tokens.shape == (4, 4)
