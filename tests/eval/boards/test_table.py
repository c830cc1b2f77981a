"""Figures from lines: both sides of a ratio are resampled together, verdicts need an interval without equality."""

from pathlib import Path
from typing import Any

import pytest

from lantern.eval.boards.plot import save
from lantern.eval.boards.table import changes, figures, refusal_of, tokens_ratio, verdict
from lantern.eval.json_lines import read_lines
from lantern.eval.metrics.distances import Estimate

NONE = Estimate(0.0, 0.0, 0.0)


def records(*steps: int) -> list[dict[str, Any]]:
    return [{"steps": count, "total_variation": 0.0} for count in steps]


def test_both_methods_are_resampled_together() -> None:
    found = tokens_ratio(records(10, 20, 60), records(20, 40, 120))
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.01, 1.3, "more tokens per step"), (0.7, 0.99, "fewer tokens per step"), (0.9, 1.1, "none")],
)
def test_a_verdict_needs_an_interval_without_equality(low: float, high: float, word: str) -> None:
    assert verdict(Estimate((low + high) / 2, low, high), NONE) == word


def test_networks_of_other_training_allow_no_verdict() -> None:
    assert refusal_of({"drafter": None}, {"drafter": None}) is None  # the same network
    assert refusal_of({}, {"drafter": 640}) is None
    assert refusal_of({"parts/eagle3": 640}, {"drafter": 640}) is None
    assert "parts/poss 300 and drafter 640" in str(refusal_of({"parts/poss": 300}, {"drafter": 640}))
    assert "not recorded" in str(refusal_of({"parts/poss": None}, {"drafter": None}))


def test_differences_have_an_interval_from_both_sides() -> None:
    plain = {"kid": {"value": 0.10, "low": 0.07, "high": 0.14}}
    far, near = ({"kid": {"value": value, "low": value - 0.04, "high": value + 0.03}} for value in (0.2, 0.11))
    found = changes(far, plain)["kid"]
    assert found["value"] == pytest.approx(0.1) and not found["is_within"]
    assert (found["low"], found["high"]) == pytest.approx((0.1 - 0.0565685, 0.1 + 0.0424264), abs=1e-6)
    assert changes(near, plain)["kid"]["is_within"]


def test_a_differing_exact_method_is_a_failure(board_file: Path) -> None:
    header, lines = read_lines(board_file)
    plain = {line["round"]: line for line in lines if line.get("contender") == "plain | eager fp32"}
    for line in lines:
        if line.get("contender") == "eagle1 | eager fp32" and line["round"] == 2:
            line["images"][0]["tokens"] = plain[0]["images"][0]["tokens"]
    assert figures(header, lines)["failures"] == ["eagle1 differs from plain decoding in 1 of 4 images"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_equal_lines_give_equal_bytes(board_file: Path, tmp_path: Path, suffix: str) -> None:
    header, lines = read_lines(board_file)
    paths = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for path in paths:
        save(header, figures(header, lines), path)
    assert paths[0].read_bytes() == paths[1].read_bytes() and len(paths[0].read_bytes()) > 10_000
