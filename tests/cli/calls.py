import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from lantern.cli.generate import main
from lantern.cli.main import main as lantern
from lantern.training.stages import Stage

Capture = pytest.CaptureFixture[str]


def made(model: str, *arguments: str) -> int:
    """Run `lantern-generate` for a red apple; return the exit code."""
    return main(["--model", model, "--prompt", "a red apple", *arguments])


def grid(model: str, *arguments: str) -> list[list[int]]:
    assert made(model, "--tokens", "grid.json", *arguments) == 0
    return json.loads(Path("grid.json").read_text())


def refusal(capsys: Capture, code: int, expected: int = 2) -> str:
    """Return the one line that a refused call printed."""
    seen = capsys.readouterr()
    assert (code, seen.out) == (expected, ""), (code, seen)
    return error_line(seen.err)


def refused_by(capsys: Capture, *words: str) -> str:
    """Return the one line with which `lantern` refuses these words."""
    capsys.readouterr()
    assert lantern([*words]) == 2
    return one_line(capsys)


def figures(capsys: Capture, model: str, *arguments: str) -> Any:
    """Return the JSON value of `lantern-generate` for a red apple."""
    return answer(capsys, "generate", "--model", model, "--prompt", "a red apple", "--json", *arguments)


def printed(capsys: Capture, *words: str) -> str:
    """Return what `lantern` prints on stdout for these words."""
    capsys.readouterr()
    assert lantern([*words]) == 0
    return capsys.readouterr().out


def answer(capsys: Capture, *words: str) -> Any:
    """Return the JSON value that `lantern` prints for these words."""
    return json.loads(printed(capsys, *words))


def one_line(capsys: Capture) -> str:
    return error_line(capsys.readouterr().err)


def error_line(text: str) -> str:
    """Return the text's only line, which is an error."""
    (line,) = text.splitlines()
    assert line.startswith("lantern: error: ")
    return line


@contextmanager
def unread_stdout(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let stdout be a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        for name in ("stdout", "__stdout__"):
            patch.setattr(sys, name, unread)
        yield


def record_stages(patch: pytest.MonkeyPatch) -> list[Any]:
    """Let stages of a training not run, and return a list to which each appends its function, config and options."""
    found, load = [], Stage.load

    def recorded(stage: Stage) -> Any:
        function = load(stage)

        @wraps(function)
        def record(config: Any, **options: Any) -> None:
            found.append((stage.function, config, options))

        return record

    patch.setattr(Stage, "load", recorded)
    return found
