"""The training loop: a killed run ends with the weights of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lantern.core.signals import Stopped
from lantern.training.loop import LoopConfig, Task, WeightAverage, train


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


CONFIG = LoopConfig(steps=30, warmup=5, decay=10, precision="fp32", log_every=5, evaluate_every=10)


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 3}, {"precision": "bf16", "accumulate": 2}])
def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, changes: dict) -> None:
    config = replace(CONFIG, **changes)
    train(Line(), config, out=tmp_path / "whole")
    with pytest.raises(Stopped, match="terminated"):
        train(Line(kill_at=13 * config.accumulate), config, out=tmp_path / "broken")
    assert not (tmp_path / "broken" / "net.pt").exists()
    train(Line(), config, out=tmp_path / "broken")
    whole, broken = (torch.load(tmp_path / name / "net.pt", weights_only=True) for name in ("whole", "broken"))
    assert all(torch.equal(whole[k], broken[k]) for k in whole)


def test_log_holds_losses_and_held_out_figures(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if "held_out_weight" in line] == [10, 20, 30]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    class Lost(Line):
        def forward(self, *batch: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(*batch)["loss"] * torch.nan}

    with pytest.raises(RuntimeError, match="the loss became nan by step 5"):
        train(Lost(), CONFIG, out=tmp_path)
    assert not (tmp_path / "net.pt").exists()


def test_resuming_with_another_seed_is_refused(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path)
    with pytest.raises(ValueError, match="was trained with seed 0, got 1"):
        train(Line(), LoopConfig(steps=40, seed=1), out=tmp_path)


def test_learning_rate_rises_stays_and_falls() -> None:
    scales = [CONFIG.scale(step) for step in range(30)]
    assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales[5:20] == [1.0] * 15
    assert scales[29] == pytest.approx(0.1)


class Sum(Line):
    """A model without dropout: batch i of size 4 is a quarter of batch i // 4 of size 16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.size = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), size

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        whole, at = divmod(step * self.size, 16)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(whole))
        x = x[at : at + self.size]
        return x, x.sum(1, keepdim=True)


def test_signal_handlers_are_restored_after_training(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(Stopped) as stopped:
        train(Line(kill_at=3), CONFIG, out=tmp_path)
    assert stopped.value.code == 143
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_four_accumulated_batches_equal_one_of_four_times_the_size(tmp_path: Path, clip: float) -> None:
    config = replace(CONFIG, clip=clip)
    train(Sum(16), config, out=tmp_path / "large")
    train(Sum(4), replace(config, accumulate=4), out=tmp_path / "small")
    train(Sum(4), config, out=tmp_path / "alone")
    large, small, alone = (torch.load(tmp_path / n / "net.pt", weights_only=True) for n in ("large", "small", "alone"))
    for name in large:
        torch.testing.assert_close(small[name], large[name], atol=1e-6, rtol=1e-5)
    assert any((alone[name] - large[name]).abs().max() > 1e-3 for name in large)


PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from lantern.training.loop import train
sys.path.insert(0, ".")
from tests.training.test_loop import CONFIG, Half
train(Half(), replace(CONFIG, steps=6, accumulate=2, decay=0, save_seconds=0), out=Path(sys.argv[1]))
"""


class Half(Sum):
    """Each of two processes has a half of every accumulated batch."""

    def __init__(self) -> None:
        super().__init__(4)

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        return super().batch(2 * step + rank, 0, device)


def test_two_processes_equal_one_with_the_batches_of_both(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*command, str(tmp_path / "two")], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr  # all of it: the output of a process comes before its launcher's
    train(Sum(8), replace(CONFIG, steps=6, accumulate=2, decay=0), out=tmp_path / "one")
    one, two = (torch.load(tmp_path / name / "net.pt", weights_only=True) for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=1e-5)


def test_only_the_last_accumulated_batch_averages_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    seen: list[bool] = []
    backward = Accelerator.backward

    def watched(self: Accelerator, loss: Tensor) -> None:
        seen.append(self.sync_gradients)
        backward(self, loss)

    monkeypatch.setattr(Accelerator, "backward", watched)
    train(Sum(4), replace(CONFIG, steps=2, decay=0, accumulate=3), out=tmp_path)
    assert seen == [False, False, True] * 2


def test_exported_and_measured_weights_are_the_average(tmp_path: Path) -> None:
    task, last = Sum(16), []
    task.after_step = lambda step: last.append({n: p.detach().clone() for n, p in task.named_parameters()})  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in task.named_parameters()}
    train(task, replace(CONFIG, ema=0.8), out=tmp_path)
    expected = before
    for step, weights in enumerate(last):
        d = min(0.8, (1 + step) / (10 + step))
        expected = {n: d * expected[n] + (1 - d) * weights[n] for n in expected}
    kept = torch.load(tmp_path / "net.pt", weights_only=True)
    for name in kept:
        torch.testing.assert_close(kept[name], expected[name])
        assert torch.equal(task.state_dict()[name], last[-1][name])  # the task has its own weights again
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    measured = [line["held_out_weight"] for line in lines if "held_out_weight" in line]
    assert measured[-1] == pytest.approx(float(kept["net.0.weight"].sum()), abs=1e-5)


def test_resuming_with_another_kind_of_average_is_refused(tmp_path: Path) -> None:
    train(Sum(16), replace(CONFIG, ema=0.9), out=tmp_path)
    with pytest.raises(ValueError, match="was trained with an average"):
        train(Sum(16), replace(CONFIG, steps=40), out=tmp_path)
    average = WeightAverage(nn.Linear(2, 2), 0.5)
    with pytest.raises(ValueError, match="averages 1 weights, wanted 2"):
        average.load_state_dict({"weight": torch.zeros(2, 2)})


def test_frozen_weights_are_not_averaged() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert set(WeightAverage(module, 0.5).state_dict()) == {"weight"}


def test_events_hold_losses_figures_and_samples(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Sampled(Line):
        def sample(self, path: Path) -> None:
            from PIL import Image

            Image.new("RGB", (5, 4), (255, 0, 0)).save(path)

    with pytest.raises(Stopped):
        train(Sampled(kill_at=13), CONFIG, out=tmp_path)
    train(Sampled(), CONFIG, out=tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 15, 20, 25, 30]
    assert [event.step for event in events.Scalars("held_out_weight")] == [10, 20, 30]
    picture = events.Images("sample")[-1]
    assert (picture.width, picture.height, picture.step) == (5, 4, 30)


def test_log_holds_the_remaining_time(tmp_path: Path) -> None:
    train(Line(), CONFIG, out=tmp_path)
    left = [json.loads(line)["seconds_left"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert left[0] >= 0 and left[-1] == 0


@pytest.mark.parametrize(
    "changes", [{"precision": "fp8"}, {"steps": 0}, {"decay": 99}, {"accumulate": 0}, {"ema": 1.0}, {"ema": -0.1}]
)
def test_bad_schedules_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        LoopConfig(**{"steps": 10, **changes})
