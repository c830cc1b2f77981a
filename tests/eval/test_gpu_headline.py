"""The command for a GPU machine, rehearsed on a CPU without the packages that such a machine may lack."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from lantern.eval import gpu_headline
from lantern.eval.gpu_headline import SECTIONS, read, skip

# run with these packages missing, and with the model of a folder in place of the embedded one, which takes long in bf16
REHEARSAL = """
import sys
from functools import partial
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        names = ("ftfy", "diffusers", "torchao", "argcomplete", "fastapi")
        return None if name.split(".")[0] in names else super().find_spec(name, path, target)

sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
import tests.engines.cuda.conftest
from lantern.eval import gpu_headline

load, folder, *words = gpu_headline.load_model, *sys.argv[1:]
gpu_headline.load_model = lambda name, **how: load(folder, **how)
sys.exit(gpu_headline.main(words))
"""


def errors(found: Any, path: str = "") -> list[str]:
    """Return every error, and every figure that was left out, with its place."""
    if not isinstance(found, dict):
        return []
    own = [f"{path}: {found}"] if "error" in found or "left_out" in found else []
    return own + [line for name, one in found.items() for line in errors(one, f"{path}/{name}")]


def test_all_sections_run_without_packages_that_a_gpu_machine_lacks(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    words = ["--minutes", "9", "--out", str(tmp_path), "--device", "cpu", "--toy", "--worker"]
    where = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", REHEARSAL, str(folder), *words]
    done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True)
    found = json.loads((tmp_path / "headline.json").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert found["finished"] == list(SECTIONS) and errors(found["sections"]) == []
    assert set(SECTIONS) - set(found["sections"]) == {"tests"}  # those of a GPU
    plain = found["sections"]["plain"]
    assert {"cublas", "fused", "torch in a graph", "eager", "compiled layers in a graph"} <= set(plain)
    assert plain["fused"]["ms_per_token"] > 0 and plain["fused"]["share"] > 0
    assert found["sections"]["drafted"]["eagle1 chain_2"]["2.5"]["ms_per_token"] > 0
    int8 = found["sections"]["int8"]
    assert int8["plain"]["floor_ms"] < plain["fused"]["floor_ms"] and int8["eagle1 exact"]["promise"] == "tokens"
    exact = {**found["sections"]["exact"], **found["sections"]["embedded"], "int8": int8["eagle1 exact"]}
    assert len(exact) >= 2 and all(one["differing"] == 0 for one in exact.values() if one["promise"] == "tokens")
    assert found["sections"]["server"]["plain"]["images_per_second"] > 0
    assert found["sections"]["training"]["torch"]["images_per_second"] > 0


def test_a_section_that_ends_the_process_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(command: list[str], **_: Any) -> Any:
        assert command[1:3] == ["-m", "lantern.eval.gpu_headline"] and command[-5:] == [*words[-4:], "--worker"]
        found = read(tmp_path / "headline.json")
        left = [name for name in ("machine", "plain") if name not in found["finished"]]
        found["under_way"] = left[0]
        if left[0] == "plain":
            found["finished"].append("plain")
        gpu_headline.write_json(tmp_path / "headline.json", found)
        return Namespace(returncode=0 if left[0] == "plain" else gpu_headline.CRASHED)

    monkeypatch.setattr(gpu_headline.subprocess, "run", crash)
    words = ["--minutes", "1", "--out", str(tmp_path), "--device", "cpu", "--toy", "--sections", "machine", "plain"]
    assert gpu_headline.main(words) == 0
    found = read(tmp_path / "headline.json")
    assert found["finished"] == ["machine", "plain"] and found["ended_the_process"] == ["machine"]
    assert not skip(tmp_path / "headline.json", [])


def test_a_section_that_hangs_ends_the_process(tmp_path: Path) -> None:
    code = """
        import time
        from pathlib import Path
        import torch
        from lantern.eval import gpu_headline
        gpu_headline.SECTIONS["machine"], gpu_headline.SPARE = 0, 0.5
        gpu_headline.Bench.machine = lambda self: time.sleep(60)
        how = {"ending": time.monotonic() + 60, "device": torch.device("cpu"), "is_toy": True}
        gpu_headline.work(Path("headline.json"), ["machine"], **how)
    """
    command = [sys.executable, "-c", dedent(code)]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=where, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "Timeout" in done.stderr
    assert skip(tmp_path / "headline.json", ["machine"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_headline.main(["--minutes", "1", "--out", str(tmp_path / "out")]) == 2
    assert "device 'cuda' is not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out" / "headline.json").exists()
