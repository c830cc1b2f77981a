"""Session fixtures that are slow to make: a measured leaderboard, and a folder of images."""

from pathlib import Path
from typing import Any

import pytest

from lantern.eval.boards.contest import LeaderboardOptions
from lantern.generation.generator import Generator
from tests.eval.leaderboards import measured, options_of, save_board_model
from tests.eval.workers import paint, tiny_decoder
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def board_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a parallel drafter and without EAGLE-3."""
    return save_board_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def board_options(board_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LeaderboardOptions:
    """Options of the leaderboard."""
    return options_of(board_model, tmp_path_factory.mktemp("run") / "board")


@pytest.fixture(scope="session")
def board_figures(board_options: LeaderboardOptions) -> dict[str, Any]:
    """Figures of the leaderboard."""
    return measured(board_options)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """The decoder of tiny images."""
    return tiny_decoder(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def whole(decoder: Generator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert paint(decoder, out, 12) == 12
    return out
