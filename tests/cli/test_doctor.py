import pytest

from lantern.cli import doctor
from lantern.cli.doctor import Finding, compatibility
from lantern.cli.main import main
from lantern.engines.cuda.engine import GraphEngine


@pytest.mark.parametrize(
    ("torch", "torchvision"), [("2.9.0", "0.24.1"), ("2.11.0+cu130", "0.26.0"), ("2.14.1+cu130", "0.29.1")]
)
def test_versions_released_together_are_compatible(torch: str, torchvision: str) -> None:
    assert not compatibility(torch, torchvision).repair


def test_a_torchvision_ahead_of_its_torch_gets_a_repair() -> None:
    assert compatibility("2.13.0+cpu", "0.29.2").repair.endswith('"torch==2.13.*" "torchvision==0.28.*"')


def test_a_torch_too_old_gets_a_supported_range() -> None:
    assert '"torch>=2.9,<2.15"' in compatibility("2.4.1", "0.19.1").repair


def test_an_unreleased_version_is_not_a_fault() -> None:
    assert not compatibility("git", "0.28.0").repair


def test_the_report_lists_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("lantern", "python", "torch", "torchvision", "cpu", "embedded model"))
    assert code == (1 if "broken" in out else 0)


def test_a_fault_exits_with_1_and_its_repair(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([Finding("good"), Finding("bad", "mend it")]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok      good",
        "broken  bad",
        "        run: mend it",
        "faults found",
    ]


def test_a_missing_compiler_is_reported_and_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    *_, last = findings = list(doctor._engines())
    assert "g++ 9 or later, which was not found" in last.text
    assert not any(finding.repair for finding in findings)


def test_a_missing_package_is_a_fault_with_its_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("numpy", "no-such-package"))
    assert [finding.repair.split(" -m ")[-1] for finding in doctor._packages() if finding.repair] == [
        "pip install no-such-package"
    ]


def test_optional_packages_that_are_absent_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in doctor.OPTIONAL else version(name))
    monkeypatch.setattr(doctor, "CHECKS", (doctor._packages,))
    assert main(["doctor"]) == 0
    assert "absent  ftfy is not installed: prompts can be plain ASCII only" in capsys.readouterr().out


def test_extras_that_are_incomplete_are_absent_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "accelerate" else version(name))
    monkeypatch.setattr(doctor, "CHECKS", (doctor._packages,))
    assert main(["doctor"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "extra train" in line]
    assert line.startswith("absent  ") and line.endswith('run: pip install ".[train]"') and "accelerate not" in line


def test_an_engine_that_is_not_there_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor._engines,))
    monkeypatch.setattr(GraphEngine, "why_not", lambda *_, **__: "no CUDA device")
    assert main(["doctor"]) == 0
    assert "absent  engine graph: no CUDA device" in capsys.readouterr().out.splitlines()
    assert all(doctor._packages_of(extra) for extra in doctor.EXTRAS)
