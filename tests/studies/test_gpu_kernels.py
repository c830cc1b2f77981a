"""The kernels compile ahead of time, without a GPU and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "gpu_kernels.json"
SHAPES = {"embedded", "B", "L", "XL", "XXL", "3B", "Janus-1B", "Janus-7B"}


def check(found: dict, shapes: set[str]) -> None:
    assert not found["measured_on_a_gpu"]
    rows = found["kernels"]
    assert {(row["shape"], row["architecture"]) for row in rows} == {(name, cc) for name in shapes for cc in (80, 90)}
    assert all(row["spill_stores"] == row["spill_loads"] == 0 and row["registers"] <= 255 for row in rows)
    for row in found["passes"]:  # four a layer and the head; seven a layer of Janus and two of its head
        layer, head = (7, 2) if row["shape"].startswith("Janus") else (4, 1)
        assert row["launches"]["products"] % layer == head
    assert {row["shape"] for row in found["passes"]} == shapes


def test_recorded_kernels_do_not_spill() -> None:
    check(json.loads(RESULTS.read_text("utf-8")), SHAPES)


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "studies.gpu_kernels", "--out", str(tmp_path / "out.json")]
    command += ["--shapes", "embedded", "Janus-1B"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    check(json.loads((tmp_path / "out.json").read_text("utf-8")), {"embedded", "Janus-1B"})


def test_the_interpreter_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from lantern.cli.command import run_command
    from studies.gpu_kernels import COMMAND

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU: kernels are not interpreted")
    assert run_command(COMMAND, ["--out", str(tmp_path / "out.json")]) == 2 and not list(tmp_path.iterdir())
