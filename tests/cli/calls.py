"""Calls of `lantern-generate` in the process of the test."""

import json
from pathlib import Path

import pytest

from lantern.cli.generate import main

Capture = pytest.CaptureFixture[str]


def made(model: str, *arguments: str) -> int:
    """Run `lantern-generate` for a red apple; return the exit code."""
    return main(["--model", model, "--prompt", "a red apple", *arguments])


def grid(model: str, *arguments: str) -> list[list[int]]:
    """Return the written codes of a red apple."""
    assert made(model, "--tokens", "grid.json", *arguments) == 0
    return json.loads(Path("grid.json").read_text())


def refusal(capsys: Capture, code: int, expected: int = 2) -> str:
    """Return the one line on stderr of a refused call."""
    seen = capsys.readouterr()
    lines = seen.err.splitlines()
    assert (code, len(lines), seen.out) == (expected, 1, ""), (code, seen)
    assert lines[0].startswith("lantern: error: ")
    return lines[0]
