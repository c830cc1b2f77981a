"""A toy model to spoil, and `lantern-generate` with the one in the folder."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from lantern.cli.generate import main
from lantern.models.folder import Model


@pytest.fixture
def model(model: Model) -> Model:
    """A model whose target and drafter a test may spoil."""
    return replace(model, target=deepcopy(model.target), drafter=deepcopy(model.drafter))


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command for red apples with these words; return its token, stdout and stderr."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        code = main(["--model", str(folder), "--prompt", "a red apple", *map(str, words)])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return command
