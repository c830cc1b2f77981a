"""Constant depths at as many draft passes, by hand and on one image."""

import math
from pathlib import Path

import pytest
import torch

from lantern.eval.boards.draft_passes import against, counts
from lantern.models.folder import load_model
from tests.tiny_folder import save_tiny_model


def test_depths_are_interpolated_at_as_many_passes_a_step() -> None:
    method, below, above = (torch.tensor([of] * 3, dtype=torch.float64) for of in ([100, 150], [120, 120], [90, 180]))
    found = against(method, below, above)
    assert found["passes_per_step"] == 1.5
    ratio = found["log_of_tokens_ratio"]
    assert isinstance(ratio, dict)
    assert ratio["value"] == pytest.approx(math.log(120 * 90) / 2 - math.log(100)) == ratio["low"]


def test_passes_of_a_drafter_are_counted(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path / "toy", block_size=64), parts=("drafter", "text"), device="cpu")
    ((steps, passes),) = counts(model, "eagle2-paper:tree=eagle2_4_4_2", 1).tolist()
    assert 1.9 * steps < passes <= 2 * steps  # two depths, fewer at the end of the image
    ((steps, passes),) = counts(model, "eagle1:tree=chain_2", 1).tolist()
    assert passes == 2 * steps
