"""Pages and rows of pages generated from leaderboard figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from lantern.eval.boards.leaderboard_report import marks_of, page, shown_name, with_rows, words_of, write_pages
from lantern.eval.speed.surroundings import HERE
from tests.eval.leaderboards import RESULTS, rows_of


def test_page_has_every_method_once_per_temperature(board_figures: dict[str, Any]) -> None:
    text = page(board_figures)
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    assert sum(line.startswith("| eagle1 | codes |") for line in lines) == 2
    assert text.count("lantern train drafter --kind eagle3") == 1
    assert "## At equal budget" in text and "### eagle2:" in text
    widths = {line.count("|") for line in lines if " codes | " in line or " relaxed | " in line}
    assert len(widths) == 1


def test_only_rows_of_pages_are_replaced(board_figures: dict[str, Any], tmp_path: Path) -> None:
    before = "# EAGLE\n\nfive sentences\n\n<!-- row: eagle1 -->\n\nmore\n\n"
    before += "<!-- row: eagle3 -->\n<!-- row: other -->\n| mine |\n"
    once = with_rows(before, board_figures)
    assert with_rows(once, board_figures) == once
    assert once.count("| temperature |") == 1 and "not measured" in once and "| mine |" in once
    assert once.startswith("# EAGLE\n\nfive sentences\n") and "\n\nmore\n" in once and once.endswith("\n")
    other = json.loads(json.dumps(board_figures))
    rows_of(other)["eagle1"]["nodes_per_pass"] = 77.0
    assert "77.0" in with_rows(once, other) and with_rows(with_rows(once, other), board_figures) == once


def test_writing_reports_files_and_methods_without_a_page(board_figures: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "methods").mkdir()
    path = tmp_path / "methods" / "eagle.md"
    path.write_text("# EAGLE\n\n<!-- row: eagle1 -->\n")
    written, unmarked = write_pages(board_figures, tmp_path)
    assert written == [tmp_path / "leaderboard.md", path] and marks_of(path.read_text()) == ["eagle1"]
    assert "eagle1" not in unmarked and "eagle2" in unmarked
    assert write_pages(board_figures, tmp_path)[0] == [tmp_path / "leaderboard.md"]


def test_a_spelled_out_tree_is_shown_by_its_size() -> None:
    assert words_of("eagle1:tree=0 1 0.0@int4") == "eagle1, constant tree of 3 nodes, depth 2 on a 4-bit target"
    assert words_of("eagle1:tree=grown_8_2") == "eagle1:tree=grown_8_2"


def test_rebuilt_methods_are_marked() -> None:
    assert shown_name("vadusa:samples=3") == "vadusa:samples=3 (reconstructed)" and shown_name("medusa") == "medusa"


def committed() -> dict[str, Any]:
    if not RESULTS.is_file():
        pytest.skip("no leaderboard was committed: eval/results/leaderboard.json is not there")
    return json.loads(RESULTS.read_text())


def test_committed_table_matches_the_committed_figures() -> None:
    figures = committed()
    assert (HERE / "docs" / "leaderboard.md").read_text() == page(figures)


def test_rows_of_committed_pages_are_current() -> None:
    figures = committed()
    paths = sorted((HERE / "docs" / "methods").glob("*.md"))
    assert paths, "no page of a method is there"
    for path in paths:
        assert with_rows(path.read_text(), figures) == path.read_text(), f"{path.name}: lantern leaderboard --from"
