"""Session fixtures that are slow to make: a measured leaderboard, and a folder of images."""

from pathlib import Path

import pytest

from lantern.cli.command import run_command
from lantern.cli.measure import leaderboard
from lantern.generation.generator import Generator
from tests.eval.workers import paint, tiny_decoder

METHODS = ("eagle1", "eagle1-rejection", "lantern++:k=6", "bounded-window:window=4,delta=0.05/0.4")
PAIRS = ("eagle1==eagle1-rejection", "eagle1==gumbel-jacobi")


@pytest.fixture(scope="session")
def board_words(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the leaderboard, without its number of images and its file."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("a red apple\na blue cat\ntwo dog\n")
    words = ["--model", str(folder), "--prompts-file", str(prompts), "--engine", "eager", "--quiet"]
    return [*words, "--baseline", "eager", "--temperature", "1", "0", "--methods", *METHODS, "--pairs", *PAIRS]


@pytest.fixture(scope="session")
def board_file(board_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leaderboard of four images per method."""
    path = tmp_path_factory.mktemp("run") / "board.jsonl"
    assert run_command(leaderboard, [*board_words, "--images", "4", "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def decoder(folder: Path) -> Generator:
    return tiny_decoder(folder)


@pytest.fixture(scope="session")
def whole(decoder: Generator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert paint(decoder, out, 12) == 12
    return out
