"""Exit codes of every command: 0 done, 1 failed, 2 invalid input, 129, 130 and 143 for signals."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lantern.cli.command import run_command
from lantern.cli.main import SUMMARIES, main
from lantern.core import signals
from tests.cli.calls import one_line

ROOT = Path(__file__).resolve().parents[2]
# arguments that a command parses, and arguments with a bad value, a missing file or a missing folder
VALID: dict[str, list[str]] = {
    "convert": ["here", "out"],
    "assemble": ["out"],
    "train": ["data", "--out", "out"],
    "eval": ["here"],
    "reproduce": ["emoji"],
    "completion": ["bash"],
}
BAD: dict[str, list[list[str]]] = {
    "generate": [["--model", "nowhere", "--prompt", "a"], ["--prompts-file", "nowhere.txt"], []],
    "methods": [["nowhere"], ["plain", "--model", "nowhere"]],
    "convert": [["nowhere", "out"], ["here", "out"]],
    "assemble": [["out", "--transformer", "nowhere"]],
    "train": [["data", "--config", "nowhere.json", "--out", "out"], ["nowhere", "--out", "out"], ["data"]],
    "doctor": [["nowhere"]],
    "tune": [["--model", "nowhere"], ["--out", "here"]],
    "eval": [["nowhere"], ["here", "--metrics", "psnr"]],
    "bench": [["--model", "nowhere"], ["--out", "here"], ["--tau", "2"]],
    "reproduce": [["nowhere"], ["nowhere/row.json"]],
    "leaderboard": [["--from", "nowhere.json"], ["--from", "here/config.json"], ["--out", "here"]],
    "completion": [["tcsh"], []],
    "demo": [["nowhere"], ["--port", "0"]],
    "serve": [["nowhere"], ["--port", "99999"], ["--dtype", "int3"]],
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/config.json").write_text("{}")


def test_every_command_is_covered() -> None:
    assert set(BAD) == set(SUMMARIES) and set(VALID) <= set(SUMMARIES)


@pytest.mark.parametrize("name", SUMMARIES)
def test_help_and_version_are_done(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == main([name, "--version"]) == 0
    assert capsys.readouterr().err == ""


def test_help_of_no_command_imports_torch() -> None:
    code = "import sys; from lantern.cli.main import SUMMARIES, main; ["
    code += "main([name, '--help']) for name in SUMMARIES]; main(['generate', '--help-all']);"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False" and done.stderr == ""


@pytest.mark.parametrize("name", SUMMARIES)
def test_an_unknown_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, *VALID.get(name, []), "--no-such-option"]) == 2
    assert "--no-such-option" in one_line(capsys)


@pytest.mark.parametrize(("name", "arguments"), [(name, one) for name, every in BAD.items() for one in every])
def test_bad_input_is_refused_in_one_line(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, *arguments]) == 2
    one_line(capsys)
    assert sorted(map(str, Path().rglob("*"))) == ["here", "here/config.json"]


def stop(number: int) -> Callable[[Any], int]:
    def run(args: Any) -> int:
        signal.raise_signal(number)
        return 0

    return run


def fail(error: Exception) -> Callable[[Any], int]:
    def run(args: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize("name", SUMMARIES)
def test_failures_and_signals_have_their_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(f"lantern.cli.{name}").COMMAND
    cases = [
        (stop(signal.SIGINT), 130, "interrupted"),
        (stop(signal.SIGTERM), 143, "terminated"),
        (stop(signal.SIGHUP), 129, signals.WORDS[signal.SIGHUP]),
        (fail(OSError(28, "No space left on device", "x")), 1, "x: No space left on device"),
        (fail(ModuleNotFoundError("No module named 'x'")), 1, "No module named 'x'; in the clone"),
        (fail(MemoryError("no memory")), 1, "no memory"),
        (fail(ValueError("bad")), 2, "bad"),
    ]
    for run, code, text in cases:
        assert run_command(dataclasses.replace(command, run=run), VALID.get(name, [])) == code
        assert text in one_line(capsys)


def test_a_signal_while_arguments_are_read_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module("lantern.cli.doctor").COMMAND
    late = dataclasses.replace(command, add_arguments=lambda parser: signal.raise_signal(signal.SIGTERM))
    assert run_command(late, []) == 143
    assert "terminated" in one_line(capsys)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_process_that_computes_ends_with_the_token_of_its_signal(number: int, code: int) -> None:
    script = (
        "import dataclasses, sys, time; from lantern.cli import main as program, methods;"
        "run = lambda args: print('begun', flush=True) or time.sleep(100);"
        "methods.COMMAND = dataclasses.replace(methods.COMMAND, run=run); sys.exit(program.main(['methods']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "begun\n"
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == code and errors.startswith("lantern: error: ") and len(errors.splitlines()) == 1
