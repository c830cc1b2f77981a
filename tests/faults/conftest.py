"""A toy model to spoil, and `lantern-generate` with the one in the folder."""

from collections import ChainMap
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lantern.cli.generate import main
from lantern.models import folder as model_folder
from lantern.models.folder import Model


@pytest.fixture
def model(model: Model) -> Model:
    """A model whose target and drafter a test may spoil."""
    add_ons: Any = model.add_ons
    add_ons = ChainMap({"eagle1": deepcopy(model.drafter)}, add_ons)
    return replace(model, target=deepcopy(model.target), add_ons=add_ons)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command for red apples with these words; return its token, stdout and stderr."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        code = main(["--model", str(folder), "--prompt", "a red apple", *map(str, words)])
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return command


@pytest.fixture
def changed_models(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], object]], None]:
    """Let the command load models that a function has changed."""
    load = model_folder.load_model

    def change_by(change: Callable[[Any], object]) -> None:
        def load_changed(*args: Any, **options: Any) -> Model:
            change(model := load(*args, **options))
            return model

        monkeypatch.setattr(model_folder, "load_model", load_changed)

    return change_by
