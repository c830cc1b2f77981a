"""The campaign: order, limits, resuming, and records."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lantern.eval import gpu_campaign as campaign
from lantern.eval.gpu_campaign import Plan, Task, pending, run_campaign, run_task, throughput


@pytest.fixture(autouse=True)
def fixed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "machine", lambda device: {"gpu": "fake", "commit": "c0ffee"})


def snippet(name: str, code: str, seconds: float = 60.0, **more: Any) -> Task:
    return Task(1, name, ("-c", code), seconds, **more)


def started(plan: Plan, tasks: list[Task], seconds: float = 3600.0) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return run_campaign(plan, tasks, seconds, say=lines.append), lines


def plan_in(folder: Path) -> Plan:
    return Plan(folder, folder / "work", "cpu", is_toy=True)


def test_every_task_leaves_a_record_with_machine_and_output(tmp_path: Path) -> None:
    is_done, lines = started(plan_in(tmp_path), [snippet("one", "print('hello')", figures=lambda: {"rate": 3})])
    found = json.loads((tmp_path / "one.json").read_text())
    assert is_done and len(lines) == 2
    assert found["status"] == "done" and found["output"] == "hello\n" and found["figures"] == {"rate": 3}
    assert found["machine"]["commit"] == "c0ffee" and found["exit_code"] == 0 and found["attempts"] == 1
    assert found["command"] == ["python", "-c", "print('hello')"]


def test_a_second_start_runs_what_is_not_done_with_the_fewest_attempts_first(tmp_path: Path) -> None:
    plan, mark = plan_in(tmp_path), tmp_path / "mark"
    fails_once = f"import pathlib, sys; p = pathlib.Path({str(mark)!r}); sys.exit(0 if p.exists() else p.touch() or 3)"
    tasks = [snippet("first", "pass"), snippet("second", fails_once), snippet("third", "pass")]
    assert not started(plan, tasks[:2])[0]
    assert json.loads((tmp_path / "second.json").read_text())["exit_code"] == 3
    assert [task.name for task in pending(tasks, tmp_path)] == ["third", "second"]
    is_done, lines = started(plan, tasks)
    assert is_done and [line.split(", ")[1].split(":")[0] for line in lines] == ["third"] * 2 + ["second"] * 2
    assert json.loads((tmp_path / "second.json").read_text())["attempts"] == 2


def test_a_task_is_stopped_at_its_limit_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    late = f"import pathlib, time; time.sleep(60); pathlib.Path({str(child)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])"
    begin = time.monotonic()
    found = run_task(snippet("long", code), limit=0.5)
    assert found["status"] == "stopped" and time.monotonic() - begin < 30 and not child.exists()


def test_a_task_that_ignores_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "GRACE", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    found = run_task(snippet("deaf", code), limit=1.0)
    assert found["status"] == "stopped" and found["exit_code"] == -9


def test_the_campaign_ends_in_time_and_starts_no_task_without_time(tmp_path: Path) -> None:
    clock = iter((0.0, 0.0, 40.0, 70.0)).__next__
    limits: list[float] = []
    real = campaign.run_task

    def noted(task: Task, limit: float) -> dict[str, Any]:
        limits.append(limit)
        return real(task, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "run_task", noted)
        tasks = [snippet(name, "pass", seconds=60.0) for name in ("a", "b", "c")]
        lines: list[str] = []
        assert not run_campaign(plan_in(tmp_path), tasks, 100.0, say=lines.append, now=clock)
    assert limits == [60.0, 45.0]  # 100 - 40 - GRACE are left for the second task
    assert "time is over before c" in lines[-1] and not (tmp_path / "c.json").exists()


def test_a_failed_preparation_is_a_failed_task(tmp_path: Path) -> None:
    def prepare() -> None:
        raise ValueError("no images")

    found = run_task(snippet("lame", "pass", prepare=prepare), limit=9.0)
    assert found["status"] == "failed" and found["output"] == "ValueError: no images" and found["exit_code"] is None


def test_the_parts_are_in_order_and_reach_everything(tmp_path: Path) -> None:
    for plan in (plan_in(tmp_path), Plan(tmp_path, tmp_path / "work", "cuda")):
        tasks = plan.tasks()
        parts = [task.part for task in tasks]
        assert parts == sorted(parts) and set(parts) == set(campaign.PARTS)
        assert len({task.name for task in tasks}) == len(tasks)
        assert all(task.arguments[:2] == ("-m", task.arguments[1]) for task in tasks)


def test_records_hold_no_path_of_the_machine(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    started(plan, [snippet("one", f"print({str(tmp_path / 'x')!r}, {str(campaign.CHECKOUT)!r})")])
    text = (tmp_path / "one.json").read_text()
    assert str(tmp_path) not in text and str(campaign.CHECKOUT) not in text and "DIR/x" in text


def test_throughput_is_that_of_the_later_half(tmp_path: Path) -> None:
    lines = [{"step": s, "seconds": t, "loss": 1.0} for s, t in ((10, 50.0), (20, 51.0), (30, 52.0), (40, 53.0))]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(line) for line in [*lines, {"steps": 40, "step": 2}]) + "\n")
    assert throughput(log, 8) == {"steps_per_second": 10.0, "pictures_per_second": 80.0}
    assert throughput(tmp_path / "none", 8)["steps_per_second"] is None


def test_gpu_tests_need_no_repository_and_no_network() -> None:
    for path in campaign.gpu_tests():
        text = path.read_text(encoding="utf-8")
        assert '"git"' not in text and "http" not in text, path


def test_one_part_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--minutes", "5", "--device", "cpu", "--toy", "--out", str(tmp_path), "--parts", "1"]
    tiny = [snippet("doctor", "print('well')")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "tasks", lambda self: tiny)
        assert campaign.main(words) == 0
    assert capsys.readouterr().out.split() == ["1", "doctor", "done"]


@pytest.mark.slow
def test_the_rehearsal_runs_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real machine
    words = ["--minutes", "30", "--device", "cpu", "--toy", "--out", str(tmp_path)]
    assert campaign.main(words) == 0
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert all(found["status"] == "done" for name, found in records.items() if "status" in found)
    assert {found["part"] for found in records.values() if "part" in found} == set(campaign.PARTS)
    assert records["training"]["figures"]["steps_per_second"] > 0
    assert records["embedded-1-figures"]["races"] and records["equality-cells"]["cells"]
    assert not {str(tmp_path), str(campaign.CHECKOUT)} & set(json.dumps(records).split('"'))
