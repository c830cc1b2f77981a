"""What all commands share: help, refusals in one line, exit codes, signals and standard output."""

import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.cli.command import Command, OneOf, existing, number, parser_of, run_command
from lantern.cli.eval import COMMAND as EVAL
from lantern.cli.main import SUMMARIES, main
from lantern.core import process
from tests.cli.calls import Capture, one_line

ROOT = Path(__file__).parents[2]
NAMELESS = "; a prompt is given with --prompt, in quotes"
TRAIN = " --config here/config.json --out out"
# calls, each with a part of its refusal; `here` is a folder with an empty config.json and an empty board, TOY a model
REFUSED = {
    "genrate": "unknown command 'genrate'; did you mean 'generate'?",
    "zzz": "known are assemble, bench, completion, convert, demo, doctor, eval, generate",
    "generate apple": NAMELESS,
    "generate --prompt a red apple": NAMELESS,
    "generate --model nowhere --prompt a": "nowhere",
    "generate --prompts-file nowhere.txt": "nowhere.txt",
    "generate": "wanted prompts or class labels, got neither",
    "methods medsua": "did you mean 'medusa'?",
    "methods nowhere": "wanted a method that `lantern methods` lists",
    "methods plain --model nowhere": "nowhere",
    "convert nowhere out": "does not exist",
    "convert here out": "here",
    "convert here out --image-sise 256": "did you mean '--image-size'?",
    "assemble out --transformer nowhere": "does not exist",
    "train data --config nowhere.json --out out": "nowhere.json",
    "train data --config data-foldr --out out": "did you mean 'data-folder'?",
    "train data": "--out",
    "train data --out out --no-such": "--no-such",
    "train data --recipe emojis" + TRAIN: "recipe 'emojis' is not in",
    "train data --packages ." + TRAIN: "stage data takes no --packages; it takes --path",
    "train tokeniser" + TRAIN: "invalid choice: 'tokeniser'",
    "train text" + TRAIN: "stage text needs --packages",
    "train target" + TRAIN: "stage target needs --data",
    "train target --steps -1" + TRAIN: "wanted a whole number from 0",
    "train target --minutes 0" + TRAIN: "--minutes: '0', wanted a number from 0.001",
    "train target --data no-such-folder" + TRAIN: "does not exist",
    "train target --records ." + TRAIN: "unknown argument '--records'",
    "train all --steps 3 --minutes 1" + TRAIN: "got --steps and --minutes: give one of them",
    "train policy --kind c2t --records here --out out": "holds no *.safetensors",
    "train tables --config tables-sam --kind fr-spec --prompts . --out out": "a config of kind sam, got --kind fr-spec",
    "doctor nowhere": "nowhere",
    "doctor --model .": "is not a model: it has neither config.json nor transformer/config.json",
    "doctor --size 7by7": "wanted width and height in pixels",
    "doctor --size 64x64": "--size is an option of --model, which is missing",
    "doctor --batch 2": "--batch is an option of --model",
    "doctor --model TOY --size 64x64": "makes images of one size: omit the size",
    "tune --model nowhere": "nowhere",
    "tune --out here": "is a folder",
    "tune --max-tv 2": "0 to 1",
    "tune --max-nodes 1": "from 2 to 256",
    "tune --images 0": "whole number",
    "tune --image 3": "did you mean '--images'?",
    "tune --model TOY --prompts-file missing.txt": "No such file",
    "tune --model TOY --temperature 1e-9": "temperature",
    "eval here --no-such": "--no-such",
    "bench --model no-such-model": "neither a folder nor a hub id",
    "bench --out here": "is a folder, wanted a file",
    "bench --tau 2": "--tau is an option of --shape",
    "bench --shape L --methods eagle1": "--methods is an option of a model",
    "bench --shape M": "wanted one of B, L",
    "bench --variants int4": "wanted one of eager",
    "bench --images 0": "wanted a whole number from 1",
    "bench --model TOY --methods eagel1": "did you mean 'eagle1'",
    "reproduce emoji --actors 2": "--actors is an option of --ray",
    "reproduce coco2014-3k": "did you mean 'coco2014-30k'",
    "reproduce nowhere": "nowhere",
    "reproduce nowhere/row.json": "nowhere",
    "leaderboard --from nowhere.json": "does not exist",
    "leaderboard --from here/config.json": "here/config.json",
    "leaderboard --from here/board.jsonl": "has no fingerprint",
    "leaderboard --from here/board.jsonl --metrics fid --top-k 5": "--metrics, --top-k, which --from does not use",
    "leaderboard --out here": "is a folder",
    "leaderboard --model TOY --methods plain": "always measured",
    "leaderboard --model TOY --methods eagle9": "did you mean",
    "leaderboard --model TOY --pairs eagle1": "wanted METHOD==METHOD",
    "leaderboard --model TOY --metrics kidd": "kidd",
    "leaderboard --model TOY --metrics kid": "kid: it compares with real images: give them with --reference",
    "leaderboard --model TOY --metrics fid --reference here/config.json": "fid: no weights of inception",
    "leaderboard --model TOY --reference here/config.json": "--metrics, which is missing",
    "leaderboard --metrics clip --weights clpi=here": "did you mean 'clip'?",
    "completion tcsh": "wanted one of bash",
    "completion": "SHELL",
    "demo nowhere": "nowhere",
    "demo --port 0": "from 1 to 65535",
    "serve nowhere": "nowhere",
    "serve --replicas 2": "--replicas is an option of --ray",
    "serve nowhere --ray": "nowhere",
    "serve --port 99999": "from 0 to 65535",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path))  # without weights
    Path("here").mkdir()
    Path("here/config.json").write_text("{}")
    Path("here/board.jsonl").write_text("{}\n")


def called(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_refused_in_one_line(words: str, model: str, capsys: Capture) -> None:
    assert main(words.replace("TOY", model).split()) == 2
    assert REFUSED[words] in one_line(capsys) and not (Path(model) / "profile.json").exists()
    assert sorted(map(str, Path().rglob("*"))) == ["here", "here/board.jsonl", "here/config.json"]


def test_values_of_a_repeated_option_are_all_taken_in_place_of_the_default() -> None:
    parser = parser_of(EVAL, "lantern eval")
    assert parser.parse_args(["."]).metrics is None
    for words in (["--metrics", "psnr", "is"], ["--metrics", "psnr", "--metrics", "is"]):
        assert parser.parse_args([".", *words]).metrics == ["psnr", "is"]


def test_every_command_has_help_a_version_and_refusals(capsys: Capture) -> None:
    from lantern import __version__

    assert {words.split()[0] for words in REFUSED} >= set(SUMMARIES)
    assert main([]) == 2 and "usage: lantern" in capsys.readouterr().err
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUMMARIES)
    for words in ([], *([name] for name in SUMMARIES)):
        assert main([*words, "--version"]) == 0
        assert capsys.readouterr().out == f"lantern {__version__}\n"


def failing(error: BaseException | signal.Signals) -> Command:
    def fail(args: object) -> int:
        if isinstance(error, signal.Signals):
            signal.raise_signal(error)
            return 0
        raise error

    return Command("fail", "Fails.", lambda parser: None, fail)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("got 3,\nwanted 4"), 2, "got 3, wanted 4"),
        (OSError(28, "No space left on device", "x.png"), 1, "x.png: No space left on device"),
        (OSError(28, "No space left on device", "from.png", None, "to.png"), 1, "to.png: No space left on device"),
        (ConnectionError("the hub did not answer"), 1, "the hub did not answer"),
        (ModuleNotFoundError("No module named 'accelerate'"), 1, "No module named 'accelerate'; in the clone"),
        (KeyError("k"), 1, "KeyError: 'k' (--debug prints a traceback)"),
        (MemoryError(), 1, "out of memory: MemoryError"),
        (MemoryError("no memory"), 1, "error: no memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory: DefaultCPU"),
        (FloatingPointError("layer 3 gave NaN"), 1, "layer 3 gave NaN"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, process.WORDS[signal.SIGHUP]),
    ],
)
def test_a_failure_is_a_line_and_code(
    capsys: Capture, error: BaseException | signal.Signals, code: int, text: str
) -> None:
    assert run_command(failing(error), []) == code
    assert text in one_line(capsys)


@pytest.mark.parametrize("by_variable", [False, True])
def test_debug_prints_a_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    monkeypatch.setenv("LANTERN_DEBUG", "1" if by_variable else "0")
    assert run_command(failing(KeyError("k")), [] if by_variable else ["--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and "raise error" in lines[-3] and "KeyError: 'k'" in lines[-1]


def test_debug_is_an_option_of_stages_too(capsys: Capture) -> None:
    assert main(["train", "data", "--config", "nowhere.json", "--out", "out", "--debug"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_signal_while_arguments_are_read_ends_in_one_line(capsys: Capture) -> None:
    late = Command("late", "Late.", lambda parser: signal.raise_signal(signal.SIGTERM), lambda args: 0)
    assert run_command(late, []) == 143
    assert "terminated" in one_line(capsys)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["--help", "completion bash", "generate --version", "generate --help-all", "methods"])
def test_output_that_cannot_be_written_is_a_failure(words: str) -> None:
    command = f"unset PYTHONUNBUFFERED; {sys.executable} -m lantern.cli.main {words}"
    found = called("bash", "-c", f"{command} > /dev/full")
    assert (found.returncode, found.stderr) == (1, "lantern: error: No space left on device\n")
    found = called("bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(("closed", "words", "code"), [(1, "methods", 0), (2, "methods nowhere", 2)])
def test_a_stream_that_is_closed_takes_nothing_and_stops_nothing(closed: int, words: str, code: int) -> None:
    line = "from lantern.cli.main import main; import sys; code = main(); sys.stdout.encoding, sys.exit(code)"
    found = called("bash", "-c", f"{sys.executable} -c '{line}' {words} {closed}>&-")
    assert (found.returncode, found.stdout, found.stderr) == (code, "", "")


@pytest.mark.parametrize("kind", [number(int, 0, 100), number(float, 0, 100), OneOf(["plain", "lantern"]), existing])
@settings(deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.floats().map(str), st.integers().map(str), st.just("0x10")))
def test_a_text_gives_a_value_within_its_bounds_or_a_short_error(kind: Callable[[str], Any], text: str) -> None:
    try:
        value = kind(text)
    except ArgumentTypeError as error:
        assert len(str(error)) < 200
    else:
        assert not isinstance(value, int | float) or (0 <= value <= 100 and value == float(text))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["--config", "--out", "target", "-", "--", "x", "--steps", "nan", "", "--help", "--no"]))
)
def test_random_arguments_give_an_exit_code(arguments: list[str]) -> None:
    for name in ("convert", "train"):
        assert main([name, *arguments]) in (0, 1, 2)
