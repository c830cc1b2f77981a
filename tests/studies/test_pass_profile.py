"""Profile of a fused pass: its parts add up, and profiling does not change the output."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.command import run_command
from lantern.engines.cpu.engine import CpuTarget
from lantern.engines.cpu.kernels import PARTS
from studies.pass_profile import COMMAND, profile, windows
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fused passes")

FUSABLE: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}


def test_parts_add_up_and_profiling_is_switched_off() -> None:
    target: Any = tiny_target(**FUSABLE)
    target = CpuTarget(target)
    rows = profile(target, [1, 4], rounds=3)
    assert [row["nodes"] for row in rows] == [1, 4] and target.program.spent is None
    for row in rows:
        assert list(row["parts"]) == [*PARTS, "rest"]
        assert min(row["parts"].values()) > 0  # the rest too: parts do not exceed the pass


def test_profiling_changes_no_bit() -> None:
    target: Any = tiny_target(**FUSABLE)
    target = CpuTarget(target)
    make: Any = windows(target, 3)
    alone = make().logits
    target.program.spent = spent = torch.zeros(torch.get_num_threads(), len(PARTS), dtype=torch.float64)
    assert torch.equal(make().logits, alone) and spent[0].gt(0).all()


def test_figures_are_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_tiny_model(tmp_path / "tiny", **FUSABLE), tmp_path / "profile.json"
    options = ["--model", str(folder), "--nodes", "2", "1", "--rounds", "1", "--out", str(out)]
    assert run_command(COMMAND, options) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["nodes"] for row in found["rows"]] == [1, 2] and found["dtype"] == "bf16"
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["nodes", "pass", "norm"]
