"""Figures from lines: both sides of a ratio are resampled together, verdicts need an interval without equality."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern.eval.boards import table
from lantern.eval.boards.plot import save
from lantern.eval.boards.table import correct, figures, figures_of, rendered
from lantern.eval.json_lines import read_lines
from lantern.eval.speed.race import pack


def test_both_methods_are_resampled_together_and_equal_images_are_no_test() -> None:
    found = table.ratio([(20, 10), (40, 20), (120, 60)])
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    assert table.p_value(np.zeros(20)) is None
    assert table.p_value(np.arange(1.0, 17.0)) == pytest.approx(2 ** (1 - 16), rel=1e-4)


def test_verdicts_are_those_that_holm_leaves() -> None:
    pairs: list[dict[str, Any]] = [
        {"p": {"tokens": p, "variation": None}, "tokens_ratio": {"value": value}}
        for p, value in ((0.02, 1.1), (0.001, 0.9), (0.04, 1.2), (0.012, 1.3))
    ]
    correct(pairs)
    assert [pair["p_holm"]["tokens"] for pair in pairs] == pytest.approx([0.04, 0.004, 0.04, 0.036])
    words = ["more tokens per step", "fewer tokens per step", "more tokens per step", "more tokens per step"]
    assert [pair["verdict"] for pair in pairs] == words
    pairs.append({"p": {"tokens": 0.03, "variation": 0.5}, "tokens_ratio": {"value": 1.1}, "variation": {"value": 0.0}})
    correct(pairs)  # two tests more
    assert [pair["verdict"] for pair in pairs] == ["none", words[1], "none", "none", "none"]


def test_the_foreground_has_its_share_of_steps_and_the_background_the_most_frequent_token() -> None:
    # runs of 1, 3 and 2 tokens; foreground are the first, one of the second run and the last two
    image = {"tokens": pack(torch.tensor([5, 7, 7, 5, 5, 5])), "runs": "1 3 2"}
    found = table.foreground([image, image], 7)
    assert found.value == pytest.approx(4 / (1 + 1 / 3 + 1 / 2 + 1 / 2)) and found.low == found.high == found.value
    tokens = torch.arange(40)
    assert table.background_of([{"tokens": pack(tokens)}]) is None
    assert table.background_of([{"tokens": pack(torch.where(tokens < 8, 3, tokens))}]) == 3


def test_networks_of_other_training_allow_no_verdict() -> None:
    assert table.refusal_of({"drafter": None}, {"drafter": None}) is None  # the same network
    assert table.refusal_of({}, {"drafter": 640}) is None
    assert table.refusal_of({"parts/eagle3": 640}, {"drafter": 640}) is None
    assert "parts/poss 300 and drafter 640" in str(table.refusal_of({"parts/poss": 300}, {"drafter": 640}))
    assert "not recorded" in str(table.refusal_of({"parts/poss": None}, {"drafter": None}))


def test_differences_have_an_interval_from_both_sides() -> None:
    plain = {"kid": {"value": 0.10, "low": 0.07, "high": 0.14}}
    far, near = ({"kid": {"value": value, "low": value - 0.04, "high": value + 0.03}} for value in (0.2, 0.11))
    found = table.changes(far, plain)["kid"]
    assert found["value"] == pytest.approx(0.1) and not found["is_within"]
    assert (found["low"], found["high"]) == pytest.approx((0.1 - 0.0565685, 0.1 + 0.0424264), abs=1e-6)
    assert table.changes(near, plain)["kid"]["is_within"]


def test_a_differing_exact_method_is_a_failure(board_file: Path) -> None:
    header, lines = read_lines(board_file)
    plain = {line["round"]: line for line in lines if line.get("contender") == "plain | eager fp32"}
    for line in lines:
        if line.get("contender") == "eagle1 | eager fp32" and line["round"] == 2:
            line["images"][0]["tokens"] = plain[0]["images"][0]["tokens"]
    assert figures(header, lines)["failures"] == ["eagle1 differs from plain decoding in 1 of 4 images"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_equal_lines_give_equal_bytes(board_file: Path, tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for path in paths:
        save(figures_of(board_file), path)
    assert paths[0].read_bytes() == paths[1].read_bytes() and len(paths[0].read_bytes()) > 10_000


PAGE = """# Methods

<!-- rows: leaderboard -->
old
<!-- end rows -->

text
<!-- rows: pairs -->
<!-- end rows -->
end
"""


def test_a_page_gets_the_rows_between_its_marks(board_file: Path) -> None:
    found = figures_of(board_file)
    text = rendered(PAGE, found)
    lines = text.splitlines()
    assert lines[:3] == PAGE.splitlines()[:3] and lines[-1] == "end" and "old" not in lines
    row = next(line for line in lines if line.startswith("| `eagle1` | ") and "same tokens" in line)
    (own,) = [one for one in found["boards"][0]["rows"] if one["method"] == "eagle1"]
    assert f"| {own['tokens_per_step']['value']:.2f} (" in row
    assert [line.split(" | ")[1] for line in lines if line.startswith("| `eagle1` | `")] == [
        *["`eagle1-rejection`"] * 2,
        *["`gumbel-jacobi`"] * 2,
    ]
    assert rendered(text, found) == text
    with pytest.raises(ValueError, match="rows: leaderboard"):
        rendered("# Methods\n", found)


def test_a_file_of_two_runs_is_refused(board_file: Path, tmp_path: Path) -> None:
    (both := tmp_path / "both.jsonl").write_bytes(board_file.read_bytes() * 2)
    with pytest.raises(ValueError, match="begins another file: take the files one by one"):
        figures_of(both)


@pytest.mark.parametrize("name", ["leaderboard", "pairs"])
def test_the_rows_of_the_page_of_methods_are_those_of_the_results(name: str) -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / "docs" / "methods.md").read_text(encoding="utf-8")
    found = figures_of(root / "eval" / "results" / "leaderboard.json")
    assert rendered(text, found) == text
    start = text.index(f"<!-- rows: {name} -->")
    figure = re.compile(r"\d\.\d\d (?=\()").search(text, start)
    changed = text[: figure.start()] + "9.99 " + text[figure.end() :]
    assert rendered(changed, found) == text  # a number written by hand does not stay
