"""TV per code of rounded weights: 0 without rounding, larger with fewer bits."""

import json
from pathlib import Path

import pytest
import torch

from lantern.core.sampling import Sampling
from studies.rounding import in_bf16, in_bits, main, total_variations
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_folder import save_tiny_model

CONDITIONS = [tiny_condition((4,)), tiny_condition((6,))]


def test_tv_is_zero_without_rounding_and_grows_with_fewer_bits() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: extra eval or dev")
    target, distribution = tiny_target(seed=3), Sampling(guidance=3.0)
    codes = torch.randint(0, target.config.vocab_size, (2, target.config.block_size))
    own, half, eight, four = (
        total_variations(target, other, CONDITIONS, codes, distribution)
        for other in (target, in_bf16(target), in_bits(8)(target), in_bits(4)(target))
    )
    assert own.shape == (codes.numel(),) and not own.any()
    assert 0 < half.mean() < eight.mean() < four.mean() < 1


def test_total_variation_is_half_the_l1_distance() -> None:
    target, distribution = tiny_target(), Sampling(guidance=1.0)
    other = tiny_target()
    for one, code in ((target, 0), (other, 1)):  # each distribution is a single code
        one.norm.weight.data.zero_()
        one.head = lambda x, code=code: torch.eye(24)[code].mul(1e4).expand(*x.shape[:-1], 24)  # type: ignore[method-assign]
    codes = torch.zeros(1, target.config.block_size, dtype=torch.long)
    assert total_variations(target, other, CONDITIONS[:1], codes, distribution).eq(1).all()


def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: extra eval or dev")
    folder, out = save_tiny_model(tmp_path / "tiny"), tmp_path / "rounding.json"
    assert main(["--model", str(folder), "--pictures", "2", "--guidance", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["weights"] for row in found["rows"]] == ["bf16", "int8", "int4"]
    assert all(0 < row["mean"] <= row["p99"] <= row["max"] for row in found["rows"])
    assert found["sampling"]["guidance"] == 2 and "int8: TV per code" in capsys.readouterr().out
