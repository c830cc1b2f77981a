"""Committed results: what makes one stale, and how the stale ones are made again, on a toy repository."""

import json
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lantern.cli import command as shared
from lantern.cli import results as cli
from lantern.cli.command import Command, Parser
from lantern.cli.main import main
from lantern.core.config import read_json_object
from lantern.eval.boards import results as results_module
from lantern.eval.boards.results import Results, figures_mark
from lantern.eval.speed.surroundings import commit

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = {"fingerprint": "f" * 64, "files": {"transformer": "a" * 64}}
MAKE = """import json, sys
from pathlib import Path
figures = json.loads(Path(sys.argv[1]).read_text()) | {"fingerprint": "f" * 64, "made": sys.argv[2:]}
Path(sys.argv[1]).write_text(json.dumps(figures | {"surroundings": {"commit": Path("head").read_text()}}))
"""


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository with one measured result, one that is made from it, and one that is kept."""
    for folder in ("eval/results", "code", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "code" / "method.py").write_text("1\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "make.py").write_text(MAKE)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Begin")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "head").write_text(commit)
    speed = {"fingerprint": "f" * 64, "surroundings": {"commit": commit}, "ratio": 1.5}
    write(tmp_path, "speed", speed)
    write(tmp_path, "old", {"fingerprint": "0" * 64})
    board = f"[speed](../eval/results/speed.json)\n<!-- {figures_mark(speed)} -->\n"
    (tmp_path / "docs" / "board.md").write_text(board)
    path = "eval/results/speed.json"
    entries = [
        {"name": "speed", "files": [path], "command": f"python make.py {path}", "code": ["code"]},
        {"name": "board", "files": ["docs/board.md"], "command": "python draw.py", "source": "speed"},
        {"name": "old", "files": ["eval/results/old.json"], "note": "Of a removed method."},
    ]
    (tmp_path / "eval" / "results" / "index.json").write_text(json.dumps({"results": entries}))
    return tmp_path


def write(root: Path, name: str, figures: dict[str, Any]) -> None:
    (root / "eval" / "results" / f"{name}.json").write_text(json.dumps(figures))


def reasons(root: Path, name: str = "speed", weights: dict[str, Any] = WEIGHTS) -> str:
    results = Results(root, weights)
    return "; ".join(results.state(results.find([name])[0]).reasons)


def edit(root: Path, name: str = "speed", **changes: object) -> None:
    path = root / "eval" / "results" / f"{name}.json"
    write(root, name, {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None})


def test_a_result_of_these_weights_and_this_code_is_current(toy: Path) -> None:
    assert reasons(toy) == "" and reasons(toy, "board") == ""


def test_other_or_unknown_weights_make_a_result_stale(toy: Path) -> None:
    assert reasons(toy, weights={"fingerprint": "e" * 64, "files": {}}) == "other weights, now eeeeeeee"
    edit(toy, fingerprint=None)
    assert reasons(toy) == "weights unknown"
    edit(toy, weights={"transformer": "a" * 64})
    assert reasons(toy) == ""


def test_drafters_that_a_board_trained_for_itself_do_not_make_it_stale(toy: Path) -> None:
    edit(toy, fingerprint="e" * 64, weights={"transformer": "a" * 64})
    assert reasons(toy) == ""
    edit(toy, weights={"transformer": "b" * 64})
    assert reasons(toy) == "other weights, now ffffffff"


def test_changed_results_and_documents_are_no_changes_of_the_code(toy: Path) -> None:
    head = git(toy, "rev-parse", "HEAD")
    for name in ("docs/page.md", "eval/results/figures.json"):
        (toy / name).write_text("1\n")
    git(toy, "add", "docs", "eval")
    assert commit(toy) == head
    (toy / "code" / "method.py").write_text("2\n")
    assert commit(toy) == head + "+changes"


def test_changed_or_unknown_code_makes_a_result_stale(toy: Path) -> None:
    (toy / "code" / "method.py").write_text("2\n")
    assert reasons(toy) == "1 files of its code changed since"
    git(toy, "commit", "-aqm", "Change")
    assert reasons(toy) == "1 files of its code changed since"
    head = git(toy, "rev-parse", "HEAD")
    edit(toy, surroundings={"commit": head})
    assert reasons(toy) == ""
    edit(toy, surroundings={"commit": head + "+changes"})
    assert "had changes that are not committed" in reasons(toy)
    edit(toy, surroundings={"commit": "1" * 40})
    assert reasons(toy) == "commit 11111111 is not in this repository"
    edit(toy, surroundings=None)
    assert reasons(toy) == "commit unknown"
    edit(toy, cells=[{"commits": [head]}, {"surroundings": {}}])
    assert reasons(toy) == "commit unknown"
    edit(toy, cells=[{"commits": [head]}])
    assert reasons(toy) == ""


@pytest.mark.parametrize(
    ("source", "is_stale"),
    [
        ('"""Doc."""\n\n\ndef f():\n    """Return one."""\n    return 1  # one\n', False),
        ('def f():\n    "Return one."\n    return 2\n', True),
        ("def f(:\n", True),
    ],
)
def test_comments_and_docstrings_are_no_changes_of_the_code(toy: Path, source: str, is_stale: bool) -> None:
    (toy / "code" / "method.py").write_text("def f():\n    return 1\n")
    git(toy, "commit", "-aqm", "Define")
    edit(toy, surroundings={"commit": git(toy, "rev-parse", "HEAD")})
    (toy / "code" / "method.py").write_text(source)
    assert bool(reasons(toy)) is is_stale


def test_a_drawing_is_stale_if_its_figures_changed(toy: Path) -> None:
    edit(toy, ratio=2.0)
    assert reasons(toy, "board") == "docs/board.md shows other figures"
    (toy / "docs" / "board.md").write_text("1.5")
    assert reasons(toy, "board") == "docs/board.md does not record its figures"
    (toy / "docs" / "board.md").unlink()
    assert reasons(toy, "board") == "docs/board.md is missing"


@pytest.fixture
def command(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared, "results_folder", lambda: toy / "eval" / "results")
    monkeypatch.setattr(cli, "present_weights", lambda: WEIGHTS)
    return toy


def test_the_list_names_files_commands_and_pages(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(command, fingerprint=None)
    assert main(["results"]) == 0
    out = capsys.readouterr().out
    assert "stale: weights unknown" in out and "python make.py eval/results/speed.json" in out
    assert "2 of 3 are stale." in out and "docs/board.md quotes stale results: speed" in out
    assert main(["results", "old", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["state"], entry["weights"]) == ("record", "00000000")
    assert main(["results", "sped"]) == 2
    assert "did you mean 'speed'?" in capsys.readouterr().err


def test_refresh_runs_the_commands_of_stale_results_alone(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command / "draw.py").write_text("raise SystemExit(3)\n")
    assert main(["results", "--refresh"]) == 0 and capsys.readouterr().err == ""
    edit(command, fingerprint="e" * 64)
    assert main(["results", "--refresh"]) == 1  # the plot is stale after its source was made again
    err = capsys.readouterr().err
    assert "speed: python make.py" in err and "the command of board ended with code 3" in err
    assert reasons(command) == ""
    assert main(["results", "--refresh", "old"]) == 2
    assert "kept as a record: Of a removed method." in capsys.readouterr().err


def test_options_of_commands_are_required_by_name_and_filled_in(command: Path, capsys: pytest.CaptureFixture) -> None:
    index = command / "eval" / "results" / "index.json"
    index.write_text(index.read_text().replace('speed.json", "code', 'speed.json {data} {commit}", "code'))
    edit(command, fingerprint="e" * 64)
    assert main(["results", "--refresh", "speed"]) == 2
    assert "speed cannot be refreshed: give --data" in capsys.readouterr().err
    assert main(["results", "--refresh", "speed", "--data", str(command)]) == 0
    made = json.loads((command / "eval" / "results" / "speed.json").read_text())["made"]
    assert made == [str(command), git(command, "rev-parse", "HEAD")[:12]]


def test_the_committed_index_lists_every_result_file() -> None:
    results = Results(ROOT, WEIGHTS)
    listed = {file for result in results.index.results for file in result.files}
    committed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "eval" / "results").iterdir()}
    assert committed - {results_module.INDEX} <= listed
    assert all((ROOT / file).is_file() for file in listed)
    for result in results.index.results:
        assert set(result.placeholders) <= set(cli.OPTIONS), result.name
        assert all((ROOT / path.removeprefix(":!")).exists() for path in result.code), result.name


# programs of the index with a parser of their own
OWN = {"lantern.training.frequency_table", "lantern.training.sam_tables", "studies.relaxation_cost"}


def test_committed_commands_are_accepted_by_their_programs() -> None:
    """Every command of the index parses, up to the point where it would run."""
    others = set[str]()
    for result in Results(ROOT, WEIGHTS).index.results:
        if not result.command:
            continue
        _, flag, module, *words = cli.words_of(result, dict.fromkeys(cli.OPTIONS, ROOT), "0" * 40)
        assert flag == "-m"
        program = import_module(f"lantern.cli.{words.pop(0)}" if module == "lantern.cli.main" else module)
        command = next((one for one in vars(program).values() if isinstance(one, Command)), None)
        if command is None:
            others.add(program.__name__)
        else:
            parser = Parser()
            command.add_arguments(parser)
            parser.parse_args(words)
    assert others == OWN


@pytest.mark.parametrize("name", ["leaderboard", "pairs", "rules", "frontier"])
def test_the_commands_of_boards_make_as_many_images_as_the_committed_files_have(name: str) -> None:
    result = next(one for one in Results(ROOT, WEIGHTS).index.results if one.name == name)
    board = read_json_object(ROOT / result.files[0])
    images = [contest["images"] for contest in board.get("contests", [board])]
    assert " --images " + " ".join(map(str, images)) + " --" in result.command


def test_a_wheel_lists_the_results_of_the_clone_in_which_it_is_called(tmp_path: Path, toy: Path) -> None:
    assert cli.root(tmp_path / "wheel", ROOT) == ROOT
    assert cli.root(ROOT, toy) == ROOT
    assert cli.root(tmp_path / "wheel", tmp_path / "elsewhere") == tmp_path / "wheel"
