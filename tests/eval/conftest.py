"""Session fixtures that are slow to make: a measured leaderboard, and a folder of images."""

from pathlib import Path

import pytest

from lantern.cli.command import run_command
from lantern.cli.leaderboard import COMMAND
from lantern.generation.generator import Generator
from tests.eval.workers import paint, tiny_decoder
from tests.tiny_folder import save_tiny_model

METHODS = ("eagle1", "eagle1-rejection", "lantern++:k=6", "bounded-window:window=4,delta=0.05/0.4")
PAIRS = ("eagle1==eagle1-rejection", "eagle1==gumbel-jacobi")


@pytest.fixture(scope="session")
def board_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the leaderboard, without its number of images and its file."""
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_model(folder / "tiny")
    (folder / "prompts.txt").write_text("a red apple\na blue cat\ntwo dog\n")
    words = ["--model", str(model), "--prompts-file", str(folder / "prompts.txt"), "--engine", "eager", "--quiet"]
    return [*words, "--baseline", "eager", "--temperature", "1", "0", "--methods", *METHODS, "--pairs", *PAIRS]


@pytest.fixture(scope="session")
def board_file(board_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leaderboard of four images per method."""
    path = tmp_path_factory.mktemp("run") / "board.jsonl"
    assert run_command(COMMAND, [*board_words, "--images", "4", "--out", str(path)]) == 0
    return path


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
