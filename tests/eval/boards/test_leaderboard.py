"""The leaderboard: all methods are measured once, and a run resumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lantern.eval.boards import board
from lantern.eval.boards import contest as running
from lantern.eval.boards.contest import LeaderboardOptions, catalogue, probe, training_steps
from lantern.eval.boards.leaderboard import Leaderboard, broken_promises, promise_of
from lantern.eval.boards.leaderboard_report import main_table
from lantern.eval.speed.contenders import PLAIN, Job
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.eval.leaderboards import SPECS, measured, refuse, rows_of


def test_catalogue_has_all_methods_except_plain_and_auto() -> None:
    assert set(catalogue()) == set(METHODS) - {PLAIN, "auto"}


def test_every_method_has_a_row_at_every_temperature(board_figures: dict[str, Any]) -> None:
    for number, images in enumerate((3, 2)):
        rows = rows_of(board_figures, number)
        assert list(rows) == [PLAIN, *SPECS]
        assert all(row["images"] == images for row in rows.values() if row["status"] == "measured")
    assert [contest["temperature"] for contest in board_figures["contests"]] == [1.0, 0.0]


def test_a_method_without_its_part_has_a_row_with_the_training_command(board_figures: dict[str, Any]) -> None:
    row = rows_of(board_figures)["eagle3"]
    assert row["status"] == "absent" and "lantern train drafter --kind eagle3" in row["command"]
    assert board_figures["failures"] == []


def test_plain_decoding_has_one_code_per_pass_and_speedup_one(board_figures: dict[str, Any]) -> None:
    plain = rows_of(board_figures)[PLAIN]
    assert plain["step_compression"]["value"] == plain["speedup_alike"]["value"] == plain["speedup"]["value"] == 1.0
    assert plain["probe"]["parameters"] == 0 and plain["nodes_per_pass"] == 0.0


def test_promises_are_codes_distribution_or_relaxed_and_codes_at_temperature_0(board_figures: dict[str, Any]) -> None:
    at_one, at_zero = ({name: row["promise"] for name, row in rows_of(board_figures, n).items()} for n in (0, 1))
    assert (at_one["eagle1"], at_one["eagle1-rejection"], at_one["lantern++:k=6"]) == (
        "codes",
        "distribution",
        "relaxed",
    )
    assert at_zero["eagle1-rejection"] == "codes" and at_zero["lantern++:k=6"] == "relaxed"
    assert promise_of(METHODS["scd"], is_greedy=False) == "distribution"


def test_exact_methods_give_plain_codes_and_relaxed_ones_report_tv(board_figures: dict[str, Any]) -> None:
    for number in (0, 1):
        for row in rows_of(board_figures, number).values():
            if row["status"] == "measured" and row["promise"] == "codes" and row["method"] != PLAIN:
                assert row["identity"]["differing_codes"] == 0 and row["identity"]["codes"] == 16 * row["images"]
    assert rows_of(board_figures)["lantern++:k=6"]["quality"]["total-variation"]["value"] > 0


def test_rows_report_nodes_depths_draft_time_and_size(board_figures: dict[str, Any], board_model: Path) -> None:
    row = rows_of(board_figures)["eagle1"]
    assert row["nodes_per_pass"] == 8.0 and 1 <= len(row["depths"]) <= 2
    assert 0 < row["probe"]["draft_share"] < 1 and sum(row["probe"]["shares"].values()) == pytest.approx(1, abs=1e-3)
    model = load_model(board_model)
    assert model.drafter is not None
    assert row["probe"]["parameters"] == sum(p.numel() for p in model.drafter.parameters())


def test_rows_report_engine_weights_tree_and_training(board_figures: dict[str, Any], board_model: Path) -> None:
    rows = rows_of(board_figures)
    alike = {"engine": "eager", "weights": "full", "dtype": "fp32"}  # what auto chooses for widths that C++ lacks
    assert rows[PLAIN]["made_with"] == alike | {"tree": None, "training_steps": {}}
    assert rows["eagle1"]["made_with"] == alike | {"tree": "grown_8_2", "training_steps": {"drafter": None}}
    assert rows["eagle2"]["made_with"]["tree"] is None
    assert list(rows["parallelspec"]["made_with"]["training_steps"]) == ["parts/parallelspec"]
    lines = main_table(board_figures["contests"][0])
    assert "engine and weights | draft tree | training steps" in lines[0]
    assert any("| eager, full fp32 | grown_8_2 | not recorded |" in line for line in lines)


def test_training_steps_are_those_that_the_component_records(board_model: Path, tmp_path: Path) -> None:
    model = replace(load_model(board_model, parts=()), folder=tmp_path)
    (tmp_path / "drafter").mkdir()
    record = tmp_path / "drafter" / "training.json"
    for text, steps in (('{"loop": {"steps": 640}}', 640), ("{", None), ('{"loop": 3}', None)):
        record.write_text(text)
        assert training_steps(model, "drafter") == steps
    assert training_steps(model, "parts/c2t") is None


def test_a_differing_code_is_reported(board_figures: dict[str, Any]) -> None:
    spoilt = json.loads(json.dumps(board_figures))
    rows_of(spoilt)["eagle1"]["identity"]["differing_images"] = 1
    rows_of(spoilt)["eagle2"] |= {"status": "failed", "reason": "RuntimeError: no"}
    reported = broken_promises(spoilt["contests"])
    assert len(reported) == 2 and "eagle1 differs" in reported[0] and "eagle2 failed" in reported[1]
    spoilt["contests"][0]["is_bitwise"] = False
    assert len(broken_promises(spoilt["contests"])) == 1


def test_a_finished_run_decodes_nothing(
    board_options: LeaderboardOptions, board_figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.Contender, "decode", refuse)
    again = measured(board_options)
    assert again["contests"] == board_figures["contests"] and again["equal_budget"] == board_figures["equal_budget"]


def test_an_interrupted_run_resumes_with_the_same_codes(
    board_options: LeaderboardOptions, board_figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, kept = replace(board_options, run=tmp_path / "board"), board.interleave

    def stop_in_round_two(*given: Any, **named: Any) -> Any:
        if (stopped.run / "temperature-1" / "rounds" / "00000.json").is_file():
            raise KeyboardInterrupt
        return kept(*given, **named)

    monkeypatch.setattr(board, "interleave", stop_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        measured(stopped)
    first = (stopped.run / "temperature-1" / "rounds" / "00000.json").read_bytes()
    monkeypatch.setattr(board, "interleave", kept)
    measured(stopped)
    assert (stopped.run / "temperature-1" / "rounds" / "00000.json").read_bytes() == first
    assert codes_of(stopped.run) == codes_of(board_options.run)


def codes_of(run: Path) -> list[dict[str, str]]:
    rounds = [json.loads(path.read_text()) for path in sorted(run.glob("*/rounds/0*.json"))]
    # rivals at equal budget depend on nothing that is timed
    return [{name: record["codes"] for name, record in sorted(entry["made"].items())} for entry in rounds]


def test_another_model_part_or_seed_is_rejected(
    board_options: LeaderboardOptions, board_figures: dict[str, Any], board_model: Path
) -> None:
    with pytest.raises(ValueError, match="other seed"):
        Leaderboard(replace(board_options, seed=1))
    config = board_model / "parts" / "parallelspec" / "config.json"
    before = config.read_text()
    try:
        config.write_text(before + "\n")
        with pytest.raises(ValueError, match="other parts"):
            Leaderboard(board_options)
    finally:
        config.write_text(before)


def test_the_first_contender_rotates(board_options: LeaderboardOptions, board_figures: dict[str, Any]) -> None:
    rounds = [
        json.loads((board_options.run / "temperature-1" / "rounds" / f"{n:05}.json").read_text()) for n in range(3)
    ]
    assert len({next(iter(entry["made"])) for entry in rounds}) == 3


def test_a_method_that_fails_is_a_row_and_a_failure(
    board_options: LeaderboardOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(contender: Any, job: Job) -> dict[str, Any]:
        if contender.label == "eagle1":
            raise RuntimeError("no such kernel")
        return probe(contender, job)

    monkeypatch.setattr(running, "probe", fail)
    few = {"specs": ("eagle1", "sjd"), "temperatures": (1.0,), "images": (1,), "equal_budget": 0}
    found = measured(replace(board_options, run=tmp_path / "board", **few))
    assert rows_of(found)["eagle1"]["status"] == "failed" and rows_of(found)["sjd"]["status"] == "measured"
    assert found["failures"] == ["eagle1 failed at temperature 1: RuntimeError: no such kernel"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (1,)}, "one number for each"),
        ({"temperatures": (1.0, 1.0)}, "different temperatures"),
        ({"equal_budget": 9}, "at most the 3"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(
    board_options: LeaderboardOptions, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(board_options, **changes)
