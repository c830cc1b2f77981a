"""Commands of a user whose home and cache folders cannot be written: not even by root, whom file modes do not bind."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lantern.engines.cpu import build as building
from lantern.models.folder import PROFILE_NAME
from tests.eval.tiny_metrics import save_pictures

ROOT = Path(__file__).resolve().parents[2]
# Runs commands, with a line after the output of each, and reports, as the last line of stdout, their exit codes and all
# that Python makes, renames to or opens to write.
WATCHED = """
import json, os, sys
from pathlib import Path

made = set()

def watch(event, given):
    if event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR) or event == "os.mkdir":
        made.add(os.path.abspath(given[0]))
    elif event == "os.rename":
        made.add(os.path.abspath(given[1]))

sys.addaudithook(watch)
from lantern.cli.main import main
from lantern.engines.cpu import build
from lantern.generation import choice

build.PACKAGED = Path("none")
choice.PACKAGE = Path(sys.argv[1])
codes = []
for words in json.loads(sys.argv[2]):
    codes.append(main(words))
    print()
    print("-", flush=True)
    print("-", file=sys.stderr)
print(json.dumps([codes, sorted(made)]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder below a file, which cannot be made."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


def run(home: Path, folder: Path, *commands: str, package: str = "none") -> list[tuple[int, str, list[str]]]:
    """Run commands in `folder`/work; return exit code, stdout and stderr of each, after checking what was written."""
    work, temporary = folder / "work", folder / "temporary"
    work.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    kept = ("PATH", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")  # of others, some name cache folders
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, package, json.dumps([shlex.split(words) for words in commands])],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    *outputs, last = done.stdout.split("\n-\n")
    codes, made = json.loads(last)
    for path in map(Path, made):
        is_attempt = path.is_relative_to(home) or home.is_relative_to(path)
        assert is_attempt or any(path.is_relative_to(place) for place in (work, temporary, "/dev")), path
    assert not home.exists()
    errors = [text.splitlines() for text in done.stderr.split("-\n")]
    return [(code, out.strip(), error) for code, out, error in zip(codes, outputs, errors, strict=False)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which the library is built")
def test_commands_use_a_private_folder_and_a_profile_needs_a_place(home: Path, folder: Path, tmp_path: Path) -> None:
    building.library()
    built = building.candidates()[0]
    private = tmp_path / "temporary" / f"lantern-{os.getuid()}"
    private.mkdir(parents=True, mode=0o700)
    for part in (built, building.record_of(built)):
        shutil.copy(part, private)
        (private / part.name).chmod(0o600)
    tune = f"tune --model {folder} --images 1 --methods scd --quiet --engine eager"
    commands = ('generate --prompt "a cat" --engine cpu --out x.png', "doctor", tune, f"{tune} --out p.json")
    generated, examined, refused, tuned = run(home, tmp_path, *commands, package=str(folder))
    assert generated[:2] == (0, "x.png") and (tmp_path / "work" / "x.png").stat().st_size > 1000
    # what was chosen, by measured times, and the statistics of every call, and no warning
    choice, figures = generated[2]
    method = choice.split("method auto is ")[1].split(":")[0]
    assert method in ("gumbel-jacobi", "plain") and figures.startswith(f"{method} (exact in tokens)")
    assert {path.name for path in private.iterdir()} == {built.name, building.record_of(built).name}
    code, out, errors = examined
    assert "engine auto" in out and code == (1 if "broken" in out else 0) and len(errors) <= 1
    code, out, [error] = refused
    assert (code, out) == (2, "") and f"{home}/.cache/lantern/profiles" in error and "(out)" in error
    assert tuned[::2] == (0, [])
    assert (tmp_path / "work" / "p.json").is_file() and not (folder / PROFILE_NAME).exists()


@pytest.mark.slow
def test_the_library_is_built_in_a_private_temporary_folder(home: Path, tmp_path: Path) -> None:
    [(code, out, _)] = run(home, tmp_path, 'generate --prompt "a cat" --engine cpu --quiet --out x.png')
    assert (code, out) == (0, "x.png")
    [folder] = (tmp_path / "temporary").glob("lantern-*")
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.glob("*.so"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "methods bounded-window",
        "completion bash",
        "convert MODEL written --dtype bf16",
        "assemble MODEL --guidance 2",
        "bench --model MODEL --methods gumbel-jacobi --variants eager --baseline eager --images 1",
        "reproduce emoji --limit 1 --metrics --quiet",
        "eval pictures --reference others --metrics psnr --draws 20",
        "leaderboard --model MODEL --methods eagle1 --engine eager --baseline eager --images 1 --out board.jsonl",
        "train drafter --target MODEL --data missing --out trained",
    ],
    ids=lambda words: words.split()[0],
)
def test_other_commands_write_nothing_there(words: str, home: Path, folder: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("pictures", "others")):
        save_pictures(tmp_path / "work" / name, 3, seed=seed)
    own = shutil.copytree(folder, tmp_path / "work" / "own")
    [(code, _, errors)] = run(home, tmp_path, words.replace("MODEL", str(own)))
    assert code == (2 if "missing" in words else 0), errors
