import pytest

from lantern.cli import doctor
from lantern.cli.doctor import Finding
from lantern.cli.main import main
from lantern.engines.cuda.engine import GraphEngine
from tests.cli.calls import Capture


def test_a_fault_exits_with_1_and_its_repair(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([Finding("good"), Finding("bad", "mend it")]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok      good",
        "broken  bad",
        "        run: mend it",
        "faults found",
    ]


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
    assert main(["doctor"]) == 0
    assert "absent  engine graph: no CUDA device" in capsys.readouterr().out.splitlines()
    assert all(doctor._requirements("lantern", extra) for extra in doctor.EXTRAS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    *_, last = findings = list(doctor._engines())
    assert "g++ 9 or later, which was not found" in last.text
    assert not any(finding.repair for finding in findings)
