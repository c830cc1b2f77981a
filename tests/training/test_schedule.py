"""Timed trainings fill their time, resume with their plan, and batches are built ahead in a thread."""

import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.signals import Stopped
from lantern.training import loop, schedule
from lantern.training.loop import Batches, Task, moved, train
from lantern.training.schedule import LoopConfig, adjusted
from tests.training.test_loop import CONFIG, Line

TIMED = replace(CONFIG, steps=1000, warmup=10, decay=400, evaluate_every=100, log_every=10, minutes=1.0)


class Clock:
    """A clock that a task moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (loop, schedule):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


class Timed(Line):
    """Takes 0.1 s a step, 0.2 s from step `slow_from` on, `first` s for the first step and 0.5 s for an evaluation."""

    def __init__(self, clock: Clock, *, first: float = 2.0, slow_from: int = 10**9, kill_at: int | None = None) -> None:
        super().__init__(kill_at)
        self.clock, self.first, self.slow_from, self.taken = clock, first, slow_from, 0

    def after_step(self, step: int) -> None:
        self.taken += 1
        self.clock.now += self.first if self.taken == 1 else 0.2 if step >= self.slow_from else 0.1

    def evaluate(self) -> dict[str, float]:
        self.clock.now += 0.5
        return super().evaluate()


def result(folder: Path) -> tuple[dict[str, Any], float]:
    found = json.loads((folder / "training.json").read_text())
    return found["loop"], found["seconds"]


class Exporting(Line):
    """Writes a component with a config."""

    def export(self, folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "config.json").write_text("{}")


def test_the_component_keeps_the_schedule_that_it_was_trained_with(tmp_path: Path) -> None:
    train(Exporting(), LoopConfig(steps=3, warmup=1, decay=1), out=tmp_path)
    found = json.loads((tmp_path / "part" / "training.json").read_text())
    assert found["loop"]["steps"] == 3 and found == json.loads((tmp_path / "training.json").read_text())


def test_a_timed_training_fills_its_time_with_steps_and_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(Clock(monkeypatch))
    train(task, TIMED, out=tmp_path)
    ran, seconds = result(tmp_path)
    assert 56 < seconds <= 60
    assert ran["steps"] == task.taken and ran["decay"] == round(0.4 * ran["steps"]) and ran["warmup"] == 10
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines if "steps" in line] == [ran["steps"]]


def test_a_timed_training_that_becomes_slower_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(Clock(monkeypatch), slow_from=200)
    train(task, TIMED, out=tmp_path)
    ran, seconds = result(tmp_path)
    assert ran["steps"] == task.taken and seconds < 75  # 83 if it were not
    assert 0 < ran["decay"] <= 0.4 * ran["steps"] + 1


@pytest.mark.parametrize("kill_at", [20, 300])
def test_a_resumed_timed_training_keeps_its_plan_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(Stopped):
        train(Timed(clock, kill_at=kill_at), TIMED, out=tmp_path)
    plan = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["plan"]
    assert (plan["steps"] > 0) == (kill_at == 300)
    train(Timed(clock), TIMED, out=tmp_path)
    ran, seconds = result(tmp_path)
    assert 55 < seconds <= 63  # the first step of the second run costs 2 s again
    if plan["steps"]:
        assert ran["steps"] == plan["steps"]


def test_killed_and_resumed_timed_training_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TIMED, minutes=0.3)
    train(Timed(Clock(monkeypatch)), config, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        train(Timed(Clock(monkeypatch), kill_at=60), config, out=tmp_path / "broken")
    train(Timed(Clock(monkeypatch), first=0.1), config, out=tmp_path / "broken")
    assert result(tmp_path / "whole")[0] == result(tmp_path / "broken")[0]
    whole, broken = (torch.load(tmp_path / name / "net.pt", weights_only=True) for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_time_that_ends_before_the_rate_is_known_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Timed(Clock(monkeypatch)), replace(TIMED, minutes=0.01), out=tmp_path)
    assert (tmp_path / "net.pt").exists() and result(tmp_path)[0]["steps"] <= 2


def test_fewer_steps_than_the_decay_shorten_it_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = adjusted(LoopConfig(steps=4000, decay=2000), steps=50)
    assert (config.steps, config.decay) == (50, 50)
    assert "decay is 2000 steps, more than the 50 steps" in capsys.readouterr().err
    assert adjusted(LoopConfig(steps=4000, decay=2000), minutes=3).minutes == 3
    with pytest.raises(ValueError, match="got --steps and --minutes"):
        adjusted(LoopConfig(steps=4000), steps=5, minutes=1)


@pytest.mark.parametrize("content", [b"", b"torn", b"PK\x03\x04torn"])
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is no whole checkpoint") as caught:
        train(Line(), CONFIG, out=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"weights": 1}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="is no checkpoint of a training"):
        train(Line(), CONFIG, out=tmp_path)


def test_batches_are_built_one_ahead_in_a_thread_and_errors_reach_the_caller() -> None:
    class Counted(Task):
        def __init__(self) -> None:
            super().__init__()
            self.built: list[tuple[int, str]] = []

        def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
            if step == 3:
                raise ValueError("no batch 3")
            self.built.append((step, threading.current_thread().name))
            return (torch.tensor([step, rank]),)

    task = Counted()
    batches = Batches(task, 1, torch.device("cpu"))
    assert batches.get(0)[0].tolist() == [0, 1]
    batches.wait()
    assert [step for step, _ in task.built] == [0, 1]
    assert all(name.startswith("batches") for _, name in task.built)
    assert [int(batches.get(n)[0][0]) for n in (1, 2)] == [1, 2]
    with pytest.raises(ValueError, match="no batch 3"):
        batches.get(3)
    batches.close()
    task.has_background_batches = False
    assert Batches(task, 0, torch.device("cpu")).get(7)[0].tolist() == [7, 0]
    assert task.built[-1] == (7, threading.current_thread().name)


def test_batches_of_any_form_move() -> None:
    @dataclass(frozen=True)
    class Pair:
        one: Tensor
        other: Tensor | None = None

    made = moved((Pair(torch.ones(2)), {"x": [torch.zeros(1)]}, "text"), torch.device("meta"))
    assert made[0].one.is_meta and made[0].other is None and made[1]["x"][0].is_meta and made[2] == "text"
