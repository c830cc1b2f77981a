"""Where the time of a fused pass goes: parts that lie within it, and the same bits whether anybody asks or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.eval.pass_profile import main, profile, windows
from lantern.kernels.fused import fuse_target
from lantern.kernels.packed import PARTS
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

FUSABLE: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}


def test_parts_lie_within_the_pass_and_nobody_is_left_asking() -> None:
    target: Any = tiny_target(**FUSABLE)
    fuse_target(target)
    rows = profile(target, [1, 4], rounds=3)
    assert [row["nodes"] for row in rows] == [1, 4] and target.fused_pass.spent is None
    for row in rows:
        assert list(row["parts"]) == [*PARTS, "rest"]
        assert min(row["parts"].values()) > 0  # the rest too: parts are no longer than the pass


def test_who_asks_changes_no_bit() -> None:
    target: Any = tiny_target(**FUSABLE)
    fuse_target(target)
    make: Any = windows(target, 3)
    alone = make().logits
    target.fused_pass.spent = spent = torch.zeros(torch.get_num_threads(), len(PARTS), dtype=torch.float64)
    assert torch.equal(make().logits, alone) and spent[0].gt(0).all()


def test_figures_are_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_tiny_model(tmp_path / "tiny", **FUSABLE), tmp_path / "profile.json"
    assert main(["--model", str(folder), "--nodes", "2", "1", "--rounds", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["nodes"] for row in found["rows"]] == [1, 2] and found["dtype"] == "bf16"
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["nodes", "pass", "norm"]
