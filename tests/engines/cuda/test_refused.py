"""What a GPU may refuse: a capture in the middle of a round, and another device than the current one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lantern.core.prepared import on_device
from lantern.core.types import Step
from tests.engines.cuda.replay import Rehearsed, RehearsedEngine
from tests.engines.cuda.test_reuse import decoder_of
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

CONDITION, KEYS = tiny_condition((4, 2)), [(9, 0), (9, 1)]


class Refused(Rehearsed):
    """Rounds whose capture fails at the end."""

    tried = 0

    def capture(self) -> tuple[Any, Step]:
        type(self).tried += 1
        super().capture()  # as a capture on a GPU, it runs nothing
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_rounds_go_on_without_a_graph_if_none_can_be_captured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    expected = decoder_of(name, target, is_graphed=False).generate(CONDITION, keys=KEYS)
    Refused.tried = 0
    made = tiny_decoder(small_method(name), target, engine=RehearsedEngine(rounds=Refused)).generate(
        CONDITION, keys=KEYS
    )
    assert Refused.tried == 1 and torch.equal(made.tokens, expected.tokens)
    assert torch.equal(made.accepted, expected.accepted) and torch.equal(made.steps, expected.steps)
    assert "no CUDA graph: operation not permitted when stream is capturing" in caplog.text


def test_kernels_and_graphs_run_on_the_gpu_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(taken.append(device)))
    for device in ("cuda:1", "cuda:0", "cpu"):
        with on_device(torch.device(device)):
            pass
    assert taken == [torch.device("cuda", 1), torch.device("cuda", 0)]
