"""Probes, commands for missing parts, and quality of relaxed methods."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.eval.boards.contest import LeaderboardOptions, command_of, how_to_get, networks_of, probe
from lantern.eval.boards.judge import Judge
from lantern.eval.boards.leaderboard import Leaderboard, change
from lantern.eval.boards.leaderboard_report import page
from lantern.eval.metrics.distances import Estimate
from lantern.eval.speed.contenders import PLAIN, Variant
from lantern.methods import METHODS
from lantern.methods.registry import add_ons
from lantern.models.folder import load_model
from tests.eval.leaderboards import measured, rows_of


def test_a_probe_counts_passes_and_keys_of_the_drafter(board_model: Path, board_options: LeaderboardOptions) -> None:
    board = Leaderboard(board_options)
    found = {}
    for spec in ("eagle1", "parallelspec", "eagle2"):
        contender = board.contests[0].enter(spec, Variant("eager", "fp32"))
        found[spec] = probe(contender, board.setting.job(0))
    assert found["eagle1"]["draft_passes"] == 2.0 and found["parallelspec"]["draft_passes"] == 1.0
    assert found["eagle2"]["draft_passes"] == METHODS["eagle2"].settings["depth"]
    assert found["eagle1"]["head_ms"] > 0 and found["eagle1"]["kv_length"] >= 16
    assert found["parallelspec"]["head_ms"] is None


def test_target_is_not_a_network_of_a_drafter(board_options: LeaderboardOptions) -> None:
    parts = Leaderboard(board_options).contests[0].enter("eagle1", Variant("eager", "fp32")).parts
    assert networks_of(parts.drafter, parts.target) == [parts.drafter.module]  # type: ignore[union-attr]


def test_parts_compute_in_the_dtype_of_the_methods(board_options: LeaderboardOptions, tmp_path: Path) -> None:
    half = Variant("eager", "bf16")
    board = Leaderboard(replace(board_options, run=tmp_path / "board", variant=half))
    drafter = board.contests[0].enter("parallelspec", half).parts.drafter
    assert {p.dtype for p in drafter.module.parameters()} == {torch.bfloat16}  # type: ignore[union-attr]
    assert {p.dtype for p in board.model.target.parameters()} == {torch.float32}


def test_every_part_has_a_command(board_model: Path) -> None:
    model = load_model(board_model)
    for part in add_ons():
        assert "MODEL" in command_of(part) or "lantern train" in command_of(part)
    wanting = [name for name, method in METHODS.items() if method.spec.add_on not in (None, "parallelspec")]
    assert all(how_to_get(model, name) for name in wanting) and how_to_get(model, "eagle1") is None
    assert "eagle1" in str(how_to_get(dataclasses.replace(model, drafter=None), "eagle1"))


class Painted(Judge):
    """A judge whose figures depend only on the mean brightness."""

    def __init__(self) -> None:
        pass

    @property
    def facts(self) -> dict[str, Any]:
        return {"seed": 0}

    def estimates(self, pictures: torch.Tensor, prompts: Any) -> dict[str, Estimate]:
        assert len(pictures) == len(prompts)
        bright = float(pictures.float().mean()) / 255
        return {"kid": Estimate(bright, bright - 0.1, bright + 0.2), "fid": Estimate(3.0)}


def test_relaxed_methods_are_compared_with_chance(board_options: LeaderboardOptions) -> None:
    found = measured(board_options, Painted())
    contest, row = found["contests"][0], rows_of(found)["lantern++:k=6"]
    assert "changes" not in rows_of(found)["eagle1"] and "fid" not in row["quality"]
    spread = contest["yardstick"]["kid"]
    assert spread["value"] == 0.0 and spread["high"] == -spread["low"] == pytest.approx(0.05**0.5, rel=1e-4)
    difference = row["quality"]["kid"]["value"] - rows_of(found)[PLAIN]["quality"]["kid"]["value"]
    assert row["changes"]["kid"]["value"] == pytest.approx(difference, abs=1e-4)
    assert row["changes"]["kid"]["is_within"] == (abs(difference) <= 0.05**0.5)
    text = page(found)
    assert "plain decoding, by chance" in text and "| lantern++:k=6 | " in text


def test_interval_of_a_change_combines_both_intervals() -> None:
    found = change(Estimate(5.0, 4.0, 8.0), Estimate(1.0, 0.5, 5.0))
    assert (found.value, found.low, found.high) == (4.0, 4.0 - (1 + 16) ** 0.5, 4.0 + (9 + 0.25) ** 0.5)
