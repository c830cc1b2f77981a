"""Drafters that are no EAGLE chain learn from the one loop: acceptance rises at every depth that they are asked for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lantern.training.drafter import DrafterTask
from tests.tiny import tiny_target, tiny_teacher
from tests.training.test_drafter import CONFIG, Kept

LEARNING = replace(CONFIG, lr=4e-3, pictures=104, held_out=8)
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "parallelspec": ({"depths": 4, "anchors": 6}, 3),
    "medusa": ({"depths": 3}, 3),
    "medusa without the token": ({"depths": 3, "reads_token": False}, 3),
    "vertical": ({"depths": 3}, 4),
    "vispec": ({"recent": 1}, 3),
}


@pytest.mark.parametrize("name", KINDS)
def test_acceptance_rises_at_every_depth(name: str) -> None:
    kind, (fields, depths) = name.split()[0], KINDS[name]
    torch.manual_seed(0)
    target, config = tiny_target(), replace(LEARNING, kind=kind, model=fields)
    reads = ("prompt",) if kind == "vispec" else ()
    task = DrafterTask(config, target, Kept(tiny_teacher(target, reads), 104))
    task.eval()
    before = task.evaluate()
    assert [key for key in before if key.startswith("accepted")] == [f"accepted_{i + 1}" for i in range(depths)]
    task.train()
    optimizer = task.optimizers()[0]
    for step in range(40):
        optimizer.zero_grad()
        task(*task.batch(step, 0, torch.device("cpu")))["loss"].backward()
        optimizer.step()
    task.eval()
    after = task.evaluate()
    rises = [after[f"accepted_{i + 1}"] - before[f"accepted_{i + 1}"] for i in range(depths)]
    # Tokens further ahead hardly follow from what is known, in a target of random weights.
    assert rises[0] > 0.06 and min(rises) > 0.02, rises
    assert all(p.grad is not None for p in task.drafter.parameters() if p.requires_grad and p.numel())
