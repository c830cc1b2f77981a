"""Commands of a user whose home and cache folders cannot be written.

The suite may run as root, whom file modes do not restrict. So the home is a path below a plain file, or in /proc, where
nobody can make a folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lantern.engines.cpu import build as building
from lantern.models.folder import PROFILE_NAME
from tests.eval.tiny_metrics import save_pictures

ROOT = Path(__file__).resolve().parents[2]
# Runs one command and reports, as the last line of stdout, all that Python makes, renames to or opens to write.
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
from lantern.generation.tuning import profile

build.PACKAGED = Path("none")
profile.PACKAGE = Path(sys.argv[1])
token = main(sys.argv[2:])
print()
print(json.dumps(sorted(made)))
sys.exit(token)
"""


@pytest.fixture(params=["below a file", pytest.param("in /proc", marks=pytest.mark.slow)])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "in /proc":
        if not Path("/proc/self").is_dir():
            pytest.skip("no /proc on this system")
        return Path("/proc/home")
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


def run(home: Path, folder: Path, *words: str, package: str = "none") -> tuple[int, str, list[str]]:
    """Run a command in `folder`/work; return its token, stdout and stderr, after checking what was written."""
    work, temporary = folder / "work", folder / "temporary"
    work.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    kept = ("PATH", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")  # of others, some name cache folders
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, package, *words], cwd=work, env=environment, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    *shown, last = done.stdout.splitlines()
    for path in map(Path, json.loads(last)):
        is_attempt = path.is_relative_to(home) or home.is_relative_to(path)
        assert is_attempt or any(path.is_relative_to(place) for place in (work, temporary, "/dev")), path
    assert not home.exists()
    return done.returncode, "\n".join(shown).strip(), done.stderr.splitlines()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which the library is built")
def test_pictures_are_made_by_a_library_in_a_private_temporary_folder(home: Path, tmp_path: Path) -> None:
    building.library()
    built = building.candidates()[0]
    private = tmp_path / "temporary" / f"lantern-{os.getuid()}"
    private.mkdir(parents=True, mode=0o700)
    for part in (built, building.record_of(built)):
        shutil.copy(part, private)
        (private / part.name).chmod(0o600)
    code, out, errors = run(home, tmp_path, "generate", "--prompt", "a cat", "--engine", "cpu", "--out", "x.png")
    assert (code, out) == (0, "x.png") and (tmp_path / "work" / "x.png").stat().st_size > 1000
    # what was chosen, by measured times, and the statistics of every call, and no warning
    choice, figures = errors
    method = choice.split("method auto is ")[1].split()[0].strip(":")
    assert method in ("gumbel-jacobi", "plain") and figures.startswith(f"{method} (exact in tokens)")
    assert {path.name for path in private.iterdir()} == {built.name, building.record_of(built).name}


@pytest.mark.slow
def test_the_library_is_built_in_a_private_temporary_folder(home: Path, tmp_path: Path) -> None:
    code, out, _ = run(home, tmp_path, "generate", "--prompt", "a cat", "--engine", "cpu", "--quiet", "--out", "x.png")
    assert (code, out) == (0, "x.png")
    [folder] = (tmp_path / "temporary").glob("lantern-*")
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.glob("*.so"))) == 1


def test_the_doctor_finds_no_fault(home: Path, tmp_path: Path) -> None:
    code, out, errors = run(home, tmp_path, "doctor")
    assert "engine auto" in out and code == (1 if "broken" in out else 0) and len(errors) <= 1


def test_a_profile_without_a_place_is_refused_before_the_measurement(home: Path, folder: Path, tmp_path: Path) -> None:
    words = ("tune", "--model", str(folder), "--images", "1", "--methods", "scd", "--quiet", "--engine", "eager")
    code, out, [error] = run(home, tmp_path, *words, package=str(folder))
    assert (code, out) == (2, "") and f"{home}/.cache/lantern/profiles" in error and "(out)" in error
    assert run(home, tmp_path, *words, "--out", "p.json", package=str(folder))[::2] == (0, [])
    assert (tmp_path / "work" / "p.json").is_file() and not (folder / PROFILE_NAME).exists()


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
        "eval pictures --reference others --metrics psnr --draws 10",
        "leaderboard --model MODEL --methods eagle1 --engine eager --baseline eager --images 1 --out board.jsonl",
        "train drafter --target MODEL --data missing --out trained",
    ],
    ids=lambda words: words.split()[0],
)
def test_other_commands_write_nothing_there(words: str, home: Path, folder: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("pictures", "others")):
        save_pictures(tmp_path / "work" / name, 3, seed=seed)
    own = shutil.copytree(folder, tmp_path / "work" / "own")
    given = {"MODEL": str(own)}
    code, _, errors = run(home, tmp_path, *(given.get(word, word) for word in words.split()))
    assert code == (2 if "missing" in words else 0), errors
