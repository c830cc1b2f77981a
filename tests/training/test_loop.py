"""The training loop: a killed run ends with the weights of an undisturbed one."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lantern.training.loop import LoopConfig, Task, train


class Line(Task):
    """Fits a noisy line with dropout, so that both data order and noise must survive a restart."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.kill_at = kill_at

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.parameters(), lr=1e-2)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        return x, x.sum(1, keepdim=True)

    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": (self.net(x) - y).square().mean()}

    def evaluate(self) -> dict[str, float]:
        return {"weight": float(next(self.net.parameters()).sum())}

    def export(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "net.pt")


@pytest.fixture(autouse=True)
def handlers():
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


CONFIG = LoopConfig(steps=30, warmup=5, decay=10, precision="fp32", log_every=5, evaluate_every=10)


def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path / "whole")
    train(Line(kill_at=13), CONFIG, out=tmp_path / "broken")
    assert not (tmp_path / "broken" / "net.pt").exists()
    train(Line(), CONFIG, out=tmp_path / "broken")
    whole, broken = (torch.load(tmp_path / name / "net.pt", weights_only=True) for name in ("whole", "broken"))
    assert all(torch.equal(whole[k], broken[k]) for k in whole)


def test_log_holds_losses_and_held_out_figures(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if "held_out_weight" in line] == [10, 20, 30]


def test_resuming_with_another_seed_is_refused(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path)
    with pytest.raises(ValueError, match="was trained with seed 0, got 1"):
        train(Line(), LoopConfig(steps=40, seed=1), out=tmp_path)


def test_rate_rises_stays_and_falls() -> None:
    scales = [CONFIG.scale(step) for step in range(30)]
    assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales[5:20] == [1.0] * 15
    assert scales[29] == pytest.approx(0.1)


@pytest.mark.parametrize("changes", [{"precision": "fp8"}, {"steps": 0}, {"decay": 99}])
def test_bad_schedules_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        LoopConfig(**{"steps": 10, **changes})
