"""What is advised where passes could be faster."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lantern.catalog import Engine
from lantern.cli.engine import advice
from lantern.cli.generate import main
from lantern.model_folder import Model
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model

FUSABLE: dict[str, Any] = {"dim": 64, "n_head": 2, "vocab_size": 32}


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_fused_passes_are_advised_where_they_can_be_had() -> None:
    told = advice(Model("toy", tiny_target(**FUSABLE)))
    assert told is not None and told.startswith("--fused ")


@pytest.mark.parametrize("engine", [Engine(fused=True), Engine(compile=True), Engine(reproducible=True)])
def test_nothing_is_advised_to_who_has_chosen(engine: Engine) -> None:
    assert advice(Model("toy", tiny_target(**FUSABLE), engine=engine)) is None


def test_nothing_is_advised_for_other_widths_or_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice(Model("toy", tiny_target())) is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert advice(Model("toy", tiny_target(**FUSABLE))) is None


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_advice_is_the_last_line_unless_all_is_to_be_quiet(
    is_quiet: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, quiet = str(save_tiny_model(tmp_path / "toy", **FUSABLE)), ["--quiet"] * is_quiet
    assert main(["--model", model, "--prompt", "a cat", "--tokens", str(tmp_path / "grid.json"), *quiet]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "--fused" in line] == ([] if is_quiet else lines[-1:])
