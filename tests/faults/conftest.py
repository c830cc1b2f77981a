"""A model at toy size in a folder, and `lantern-generate` with it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from lantern.cli.generate import main
from lantern.models.folder import Model, load_model
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def loaded(folder: Path) -> Model:
    return load_model(folder)


@pytest.fixture
def model(loaded: Model) -> Model:
    """A model whose target and drafter a test may spoil."""
    return replace(loaded, target=deepcopy(loaded.target), drafter=deepcopy(loaded.drafter))


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command for red apples with these words; return its token, stdout and stderr."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        code = main(["--model", str(folder), "--prompt", "a red apple", *map(str, words)])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return command
