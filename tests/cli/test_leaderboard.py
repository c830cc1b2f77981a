"""Files and errors of `lantern leaderboard`, with a toy model."""

import json
from pathlib import Path

import pytest

from lantern.cli.leaderboard import docs_of, main
from lantern.cli.main import SUMMARIES
from lantern.eval.boards import board
from lantern.eval.speed.surroundings import HERE
from tests.eval.leaderboards import PROMPTS, RESULTS, refuse, save_board_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_board_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def sampled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, of the extra eval")
    home = tmp_path_factory.mktemp("leaderboard")
    (home / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--model", str(folder), "--methods", "eagle1", "cool", "--images", "1", "--equal-budget", "0"]
    words += ["--baseline", "eager", "--prompts-file", str(home / "prompts.txt")]
    assert main([*words, "--run", str(home / "run"), "--out", str(home / "out"), "--quiet"]) == 0
    return home / "out"


def test_the_command_writes_figures_table_and_plots(sampled: Path) -> None:
    assert {path.name for path in sampled.iterdir()} == {f"leaderboard.{end}" for end in ("json", "md", "png", "svg")}
    assert (sampled / "leaderboard.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (sampled / "leaderboard.svg").read_text() and "leaderboard" in SUMMARIES


def test_writing_again_needs_no_model_and_gives_the_same_bytes(
    sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "load_model", refuse)
    assert main(["--from", str(sampled / "leaderboard.json"), "--out", str(tmp_path), "--quiet"]) == 0
    for name in ("leaderboard.md", "leaderboard.png", "leaderboard.svg"):
        assert (tmp_path / name).read_bytes() == (sampled / name).read_bytes()


def test_documents_of_the_checkout_change_only_with_its_own_results(tmp_path: Path) -> None:
    assert docs_of(RESULTS.parent) == HERE / "docs" and docs_of(tmp_path) == tmp_path


def test_only_generated_pages_are_replaced_without_asking(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--from", str(sampled / "leaderboard.json"), "--docs", str(tmp_path), "--quiet"]
    page, other = tmp_path / "leaderboard.md", tmp_path / "methods" / "eagle1.md"
    other.parent.mkdir()
    page.write_text("my own page\n")
    other.write_text("no mark\n| a | table |\n")
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert "leaderboard.md was not generated here" in output and "--overwrite" in output and output.count("\n") == 1
    assert page.read_text() == "my own page\n" and not (tmp_path / "out").exists()
    for more in (["--overwrite"], []):  # the second time the page is a generated one
        assert main([*words, "--out", str(tmp_path / f"out{len(more)}"), *more]) == 0
        assert page.read_bytes() == (sampled / "leaderboard.md").read_bytes()
    assert other.read_text() == "no mark\n| a | table |\n"


def test_failed_exact_methods_are_exit_code_1(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = json.loads((sampled / "leaderboard.json").read_text())
    (tmp_path / "some.json").write_text(json.dumps(figures | {"failures": ["eagle1 failed"]}))
    assert main(["--from", str(tmp_path / "some.json"), "--out", str(tmp_path), "--quiet"]) == 1
    assert "eagle1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "plain"], "always measured"),
        (["--methods", "eagle9"], "did you mean"),
        (["--images", "1", "2", "3"], "one number for each"),
        (["--weights", "inception={file}"], "--data"),
        (["--from", "{file}"], "holds no leaderboard"),
    ],
)
def test_invalid_input_is_one_line_and_code_2(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.json").write_text("{}")
    given = [word.format(file=tmp_path / "some.json") for word in words]
    assert main(["--model", str(folder), "--run", str(tmp_path / "run"), *given]) == 2
    output = capsys.readouterr().err
    assert message in output and len(output.splitlines()) == 1
