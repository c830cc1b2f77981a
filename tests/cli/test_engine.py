"""The options that choose an engine, and the advice where `auto` chose a slow one."""

from pathlib import Path
from typing import Any

import pytest

from lantern.cli.command import command, run_command
from lantern.cli.generate import main
from lantern.cli.options import Placement, advice
from lantern.engines.cpu import build
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import AutoEngine, EagerEngine, Engine, WideEngine
from lantern.models.folder import Model
from tests.cli.calls import Capture
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model

FITTING: dict[str, Any] = {"dim": 64, "n_head": 2, "vocab_size": 32}


def parsed(*options: str) -> Placement:
    found = []

    def place(*, where: Placement) -> int:
        """Place."""
        found.append(where)
        return 0

    assert run_command(command(place), options) == 0
    return found[0]


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not built; there is a compiler."""
    monkeypatch.setattr(build, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), AutoEngine()),
        (("--engine", "cpu", "--weights", "int8"), CpuEngine(weights="int8")),
        (("--engine", "graph"), GraphEngine()),
        (("--weights", "int4"), AutoEngine(weights="int4")),
        (("--engine", "wide"), WideEngine()),
        (("--weights", "bf16"), AutoEngine()),
    ],
)
def test_options_choose_engine_and_weights(options: tuple[str, ...], expected: Engine) -> None:
    assert parsed(*options).chosen() == expected


def test_bf16_weights_are_the_dtype() -> None:
    assert parsed("--weights", "bf16").options()["dtype"] == "bf16"
    assert parsed("--dtype", "fp16").options()["dtype"] == "fp16"
    with pytest.raises(ValueError, match="--weights bf16 contradicts --dtype fp32"):
        parsed("--weights", "bf16", "--dtype", "fp32").options()


def test_advice_is_given_only_where_auto_wants_an_unbuilt_library(
    unbuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = tiny_target(**FITTING)
    reported = advice(Model("toy", fitting, engine=AutoEngine()))
    assert reported is not None and "lantern doctor --build" in reported
    others = [(fitting, WideEngine()), (fitting, EagerEngine()), (tiny_target(), AutoEngine())]
    assert [advice(Model("toy", target, engine=engine)) for target, engine in others] == [None] * 3

    def no_compiler() -> str:
        raise ValueError("no g++")

    monkeypatch.setattr(build, "find_compiler", no_compiler)
    assert advice(Model("toy", fitting, engine=AutoEngine())) is None
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    assert advice(Model("toy", fitting, engine=EagerEngine(reason="a forward hook"))) is None


@pytest.mark.parametrize("is_quiet", [False, True])
def test_advice_is_the_last_line_unless_quiet(is_quiet: bool, unbuilt: None, tmp_path: Path, capsys: Capture) -> None:
    model, quiet = str(save_tiny_model(tmp_path / "toy", **FITTING)), ["--quiet"] * is_quiet
    assert main(["--model", model, "--prompt", "a cat", "--tokens", str(tmp_path / "grid.json"), *quiet]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "doctor --build" in line] == ([] if is_quiet else lines[-1:])
