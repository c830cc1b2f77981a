"""A leaderboard of a tiny model with a parallel drafter and without EAGLE-3, in two contests of three prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

from lantern.core.io import save_component
from lantern.eval.boards.contest import LeaderboardOptions
from lantern.eval.boards.judge import Judge
from lantern.eval.boards.leaderboard import Leaderboard
from lantern.eval.speed.surroundings import HERE
from lantern.models.folder import load_model
from tests.tiny_folder import save_tiny_model
from tests.tiny_parts import tiny_part

SPECS = ("eagle1", "eagle1-rejection", "eagle2", "lantern++:k=6", "parallelspec", "eagle3")
PROMPTS = ("a red apple", "a blue cat", "two dog")
RESULTS = HERE / "eval" / "results" / "leaderboard.json"


def save_board_model(folder: Path) -> Path:
    """Write the model; return its folder."""
    save_tiny_model(folder)
    shutil.rmtree(folder / "parts")
    model: Any = load_model(folder)
    module = tiny_part("parallelspec", model.target)
    save_component(module.state_dict(), module.config, folder / "parts" / "parallelspec")
    return folder


def options_of(model: Path, run: Path) -> LeaderboardOptions:
    """Return the options of the leaderboard."""
    return LeaderboardOptions(
        run=run,
        prompts=PROMPTS,
        model=str(model),
        specs=SPECS,
        images=(3, 2),
        equal_budget=2,
        baselines=("eager",),
        baseline_dtypes=("fp32",),
        is_quiet=True,
    )


def measured(options: LeaderboardOptions, judge: Judge | None = None) -> dict[str, Any]:
    """Return the figures of a leaderboard after a JSON round trip."""
    board = Leaderboard(options)
    board.measure()
    return json.loads(json.dumps(board.figures(judge)))


def rows_of(figures: dict[str, Any], contest: int = 0) -> dict[str, dict[str, Any]]:
    """Return the rows of a contest by method."""
    return {row["method"]: row for row in figures["contests"][contest]["rows"]}


def refuse(*_: object, **__: object) -> Any:
    """Replace a function that must not be called again."""
    raise AssertionError("called although its result is stored")
