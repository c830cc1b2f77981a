"""What the commands say of methods, engines and faults, and the options that choose an engine."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lantern.cli import doctor
from lantern.cli.doctor import Finding
from lantern.cli.generate import SETTINGS, advice
from lantern.cli.generate import main as generate
from lantern.cli.main import main
from lantern.cli.options import Placement
from lantern.engines.cpu import build
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import AutoEngine, EagerEngine, Engine, WideEngine
from lantern.methods import METHODS
from lantern.models.folder import Model
from tests.cli.calls import Capture, answer, printed
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model

FITTING: dict[str, Any] = {"dim": 64, "n_head": 2, "vocab_size": 32}


def test_methods_are_listed_with_what_they_promise_and_described_with_settings_and_needs(capsys: Capture) -> None:
    lines = printed(capsys, "methods").splitlines()
    for one, line in zip(METHODS.values(), lines[1:], strict=False):
        assert line.split()[:3] == [one.name, one.made.family, one.promise] and line.endswith(one.summary)
    assert [row["name"] for row in answer(capsys, "methods", "--json")] == list(METHODS)
    out = printed(capsys, "methods", "lantern++")
    assert "--lambda" in out and "arxiv.org/abs/2502.06352" in out and "drafter: lantern-emoji has it" in out
    found = answer(capsys, "methods", "medusa", "--json")
    assert found["add_ons"][0]["folder"] == "parts/medusa" and found["add_ons"][0]["present"]
    assert found["settings"][0]["flag"] == "--tree" and found["page"] == "docs/methods.md#medusa"


@pytest.mark.parametrize("name", [name for name in METHODS if not any(o.fits for o in METHODS[name].options.values())])
def test_a_method_is_described_with_all_of_its_settings(name: str, capsys: Capture) -> None:
    lines = [line.split() for line in printed(capsys, "methods", name).splitlines()]
    for option in METHODS[name].options.values():
        (found,) = [line for line in lines if line[:1] == [option.flag]]
        assert found[1:3] == [type(option.default).__name__, *str(option.default).split()[:1]]


def test_a_setting_is_the_one_that_the_default_engine_uses(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.generation.choice.suited", lambda _, method: method.with_options(window=3))
    lines = printed(capsys, "methods", "gumbel-jacobi").splitlines()
    (line,) = [one for one in lines if one.split()[:1] == ["--window"]]
    assert line.split()[2] == "3" and line.endswith("engine of this machine, elsewhere 16")
    found = answer(capsys, "methods", "gumbel-jacobi", "--json")
    assert {one["name"]: (one["default"], one["here"]) for one in found["settings"]}["window"] == (16, 3)


def test_a_setting_named_as_an_option_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    option = replace(METHODS["gumbel-jacobi"].options["window"], name="size")
    own = replace(METHODS["gumbel-jacobi"], name="mine", options={"size": option})
    monkeypatch.setitem(METHODS, "mine", own)
    monkeypatch.setitem(SETTINGS, "size", "--size")
    assert generate(["--prompt", "a cat"]) == 2
    assert "--size of method mine is an option of lantern-generate too: give" in capsys.readouterr().err


def test_methods_whose_part_the_model_lacks_are_marked(copied: Path, capsys: Capture) -> None:
    for gone, marked in ((), set()), (("parts/medusa", "drafter"), {"*medusa", "*eagle1"}):
        for name in gone:
            shutil.rmtree(copied / name)
        out = printed(capsys, "methods", "--model", str(copied))
        found = {line.split()[0] for line in out.splitlines() if line.startswith("*") and ":" not in line.split()[0]}
        assert found >= marked and bool(found) == bool(gone) == (f"NAME --model {copied} has the command" in out)
        assert "*plain" not in found and "*gumbel-jacobi" not in found
        out = printed(capsys, "methods", "medusa", "--model", str(copied))
        assert bool(gone) == ("lantern train drafter --kind medusa" in out) == (f"--target {copied}/transformer" in out)
    config = copied / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"t2i"', '"c2i"'))
    out = printed(capsys, "methods", "medusa", "--model", str(copied))
    assert "lacks it; drafters are trained for targets that take captions" in out


def test_a_fault_exits_with_1_and_its_repair(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def _my_engines() -> Any:
        raise ImportError("no torch")

    given = [Finding("good"), Finding("bad", "mend it")]
    monkeypatch.setattr(doctor, "CHECKS", (_my_engines, lambda: iter(given)))
    assert main(["doctor"]) == 1
    lines = ["ok      my engines: not checked, no torch", "ok      good", "broken  bad", "        run: mend it"]
    assert capsys.readouterr().out.splitlines() == [*lines, "faults found"]


@pytest.mark.parametrize(
    ("package", "version", "code", "line"),
    [
        ("numpy", "", 1, 'run: {pip} "numpy>=1.26"'),
        ("torch", "2.4.1", 1, "broken  torch 2.4.1: lantern needs torch<2.15,>=2.10"),
        ("torch", "2.9.99+cpu", 1, "broken  torch 2.9.99+cpu: torchvision needs torch"),
        ("ftfy", "", 0, "absent  ftfy is not installed: prompts can be plain ASCII only; {pip} ftfy"),
        ("accelerate", "", 0, 'accelerate not installed, in the clone of lantern run: pip install ".[train]"'),
    ],
)
def test_only_a_package_without_which_nothing_runs_or_of_another_version_is_a_fault(
    package: str, version: str, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    kept = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == package else kept(name))
    monkeypatch.setattr(doctor, "CHECKS", (doctor._packages,))
    assert main(["doctor"]) == code
    assert line.format(pip=doctor.PIP) in capsys.readouterr().out


def test_a_missing_engine_or_compiler_is_no_fault(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor._engines,))
    monkeypatch.setattr(GraphEngine, "why_not", lambda *_, **__: "no CUDA device")
    assert "absent  engine graph: no CUDA device" in printed(capsys, "doctor").splitlines()
    assert all(doctor._requirements("lantern", extra) for extra in doctor.EXTRAS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    *_, last = findings = list(doctor._engines())
    assert "g++ 9 or later, which was not found" in last.text
    assert not any(finding.repair for finding in findings)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not built; there is a compiler."""
    monkeypatch.setattr(build, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")


@pytest.mark.parametrize(
    ("where", "expected", "dtype"),
    [
        (Placement(), AutoEngine(), "auto"),
        (Placement(engine="cpu", target_weights="int8"), CpuEngine(weights="int8"), "auto"),
        (Placement(engine="graph"), GraphEngine(), "auto"),
        (Placement(target_weights="int4"), AutoEngine(weights="int4"), "auto"),
        (Placement(engine="wide", dtype="fp16"), WideEngine(), "fp16"),
        (Placement(target_weights="bf16"), AutoEngine(), "bf16"),
    ],
)
def test_options_choose_engine_weights_and_dtype(where: Placement, expected: Engine, dtype: str) -> None:
    assert where.options() == {"device": "auto", "dtype": dtype, "engine": expected}


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
    assert generate(["--model", model, "--prompt", "a cat", "--tokens", str(tmp_path / "grid.json"), *quiet]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "doctor --build" in line] == ([] if is_quiet else lines[-1:])
