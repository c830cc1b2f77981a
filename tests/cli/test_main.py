import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.cli.command import Command, run_command
from lantern.cli.main import SUMMARIES, main
from lantern.cli.options import existing, integer, one_of, real
from tests.cli.calls import one_line

ROOT = Path(__file__).parents[2]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUMMARIES)


def test_a_call_without_command_prints_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: lantern" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from lantern import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lantern {__version__}\n"


def test_the_error_for_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert one_line(capsys).endswith("unknown command 'genrate'; did you mean generate?")


def test_the_error_for_an_unknown_command_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zzz"]) == 2
    assert "known are generate, methods, convert, assemble, train, doctor" in one_line(capsys)


def test_the_error_for_a_misspelt_option_names_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["convert", str(tmp_path), "out", "--image-sise", "256"]) == 2
    assert "did you mean --image-size?" in one_line(capsys)


@pytest.mark.parametrize("words", [["a red apple"], ["--prompt", "a", "red", "apple"]])
def test_the_error_for_a_prompt_without_its_option_names_the_option(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["generate", *words]) == 2
    assert one_line(capsys).endswith("; a prompt is given with --prompt, in quotes")


def _failing(error: BaseException) -> Command:
    def fail(args: object) -> int:
        raise error

    return Command("fail", "Fails.", lambda parser: None, fail)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("got 3,\nwanted 4"), 2, "got 3, wanted 4"),
        (OSError(28, "No space left on device", "x.png"), 1, "x.png: No space left on device"),
        (ConnectionError("the hub did not answer"), 1, "the hub did not answer"),
        (ModuleNotFoundError("No module named 'accelerate'"), 1, "No module named 'accelerate'; in the clone"),
        (KeyError("k"), 1, "KeyError: 'k' (--debug prints a traceback)"),
        (MemoryError(), 1, "out of memory: MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory: DefaultCPU"),
        (FloatingPointError("layer 3 gave NaN"), 1, "layer 3 gave NaN"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line_and_a_token(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    assert run_command(_failing(error), []) == code
    assert text in one_line(capsys)


@pytest.mark.parametrize("by_variable", [False, True])
def test_debug_prints_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    monkeypatch.setenv("LANTERN_DEBUG", "1" if by_variable else "0")
    assert run_command(_failing(KeyError("k")), [] if by_variable else ["--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and "raise error" in lines[-3] and "KeyError: 'k'" in lines[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["--help", "--version", "methods gumbel-jacobi", "generate --version"])
def test_output_that_cannot_be_written_is_a_failure(words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "lantern.cli.main", *words.split()]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert (found.returncode, found.stderr) == (1, "lantern: error: No space left on device\n")
    line = f"{sys.executable} -m lantern.cli.main {words} | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999", "101", "", "x", "0x10"])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="wanted a number from 0 to 100"):
        real(0, 100)(text)
    with pytest.raises(Exception, match="wanted a whole number from 0 to 100"):
        integer(0, 100)(text)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_every_text_gives_a_value_or_an_argparse_error(text: str) -> None:
    from argparse import ArgumentTypeError

    for kind in (real(0, 1), integer(0, 1), one_of(["plain", "lantern"]), existing):
        try:
            kind(text)
        except ArgumentTypeError as error:
            assert len(str(error)) < 200


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["--config", "--out", "target", "-", "--", "x", "--steps", "nan", "", "--help", "--no"]))
)
def test_random_arguments_give_an_exit_code(arguments: list[str]) -> None:
    for name in ("convert", "train"):
        assert main([name, *arguments]) in (0, 1, 2)


def test_an_import_of_the_package_prints_no_warnings_of_libraries() -> None:
    pytest.importorskip("torchao")
    code = "from lantern import LanternPipeline; import diffusers.quantizers.torchao, transformers.quantizers.auto"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
