"""What all commands share: help, refusals in one line, exit codes, signals, standard output, and shell completion."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from argcomplete.finders import CompletionFinder

from lantern import __version__
from lantern.cli.command import Command, parser_of, run_command
from lantern.cli.main import COMMANDS, PROGRAMS, SHELLS, complete, main
from lantern.cli.measure import evaluate
from lantern.core import process
from lantern.methods import METHODS, find
from lantern.training.stages import STAGES
from tests.cli.calls import Capture, one_line, printed

ROOT = Path(__file__).parents[2]


def called(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_values_of_a_repeated_option_are_all_taken_in_place_of_the_default() -> None:
    parser = parser_of(evaluate, "lantern eval")
    assert parser.parse_args(["."]).metrics is None
    for words in (["--metrics", "psnr", "is"], ["--metrics", "psnr", "--metrics", "is"]):
        assert parser.parse_args([".", *words]).metrics == ["psnr", "is"]


def test_every_command_has_help_and_a_version(capsys: Capture) -> None:
    assert main([]) == 2 and "usage: lantern" in capsys.readouterr().err
    assert main(["--help", "generate"]) == 0 and capsys.readouterr().out.startswith("usage: lantern COMMAND")
    out = printed(capsys, "--help")
    assert all(name in out for name in COMMANDS)
    brief, whole = (printed(capsys, "generate", words) for words in ("--help", "--help-all"))
    assert "--help-all" in brief and "--guidance" not in brief and {"--guidance", "--engine"} <= set(whole.split())
    for words in ([], *([name] for name in COMMANDS)):
        assert printed(capsys, *words, "--version") == f"lantern {__version__}\n"


@pytest.mark.parametrize("words", ["eval nowhere --help", "train policy --steps x -h", "generate -n x --help-all"])
def test_help_comes_before_errors(words: str, capsys: Capture) -> None:
    assert main(words.split()) == 0
    seen = capsys.readouterr()
    assert seen.out.startswith(f"usage: lantern {words.split()[0]}") and not seen.err
    assert main(["eval", ".", "--help-all"]) == main(["eval", "nowhere", "--", "--help"]) == 2
    assert "'--help-all'; did you mean '--help'?" in capsys.readouterr().err


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
        (ValueError("the file holds \x1b[2J\x07\u202e"), 2, r"the file holds \x1b[2J\x07\u202e"),
        (OSError(28, "No space left on device", "x.png"), 1, "x.png: No space left on device"),
        (OSError(28, "No space left on device", "from.png", None, "to.png"), 1, "to.png: No space left on device"),
        (ConnectionError("the hub did not answer"), 1, "the hub did not answer"),
        (ModuleNotFoundError("No module named 'accelerate'"), 1, "No module named 'accelerate'; in the clone"),
        (ModuleNotFoundError("No module named 'recipes'", name="recipes"), 1, "error: No module named 'recipes'"),
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
    line = one_line(capsys)
    assert text in line and line.endswith("recipes'") == ("recipes" in text)


@pytest.mark.parametrize("by_variable", [False, True])
def test_debug_prints_a_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    monkeypatch.setenv("LANTERN_DEBUG", "1" if by_variable else "0")
    assert run_command(failing(KeyError("k")), [] if by_variable else ["--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and "raise error" in lines[-3] and "KeyError: 'k'" in lines[-1]
    assert main(["train", "data", "--config", "nowhere.json", "--out", "out", "--debug"]) == 2  # of a stage
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_signal_while_arguments_are_read_ends_in_one_line(capsys: Capture) -> None:
    late = Command("late", "Late.", lambda parser: signal.raise_signal(signal.SIGTERM), lambda args: 0)
    assert run_command(late, []) == 143
    assert "terminated" in one_line(capsys)


def test_an_interrupt_repeats_no_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(args: Any) -> None:
        threading.Timer(0.005, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        for i in count():
            print(i)

    for trial in range(40):  # the signal arrives while a line is written in about half of them
        with (tmp_path / str(trial)).open("w+") as out, monkeypatch.context() as patch:
            for name in ("stdout", "__stdout__"):
                patch.setattr(sys, name, out)
            assert run_command(Command("count", "Count.", lambda parser: None, run), []) == 130
            sys.stdout.flush()
            lines = (tmp_path / str(trial)).read_text().split("\n")[:-1]
        assert lines == [str(i) for i in range(len(lines))]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["--help", "generate --help-all", "methods"])
def test_output_that_cannot_be_written_is_a_failure(words: str) -> None:
    command = f"unset PYTHONUNBUFFERED; {sys.executable} -m lantern.cli.main {words}"
    found = called("bash", "-c", f"{command} > /dev/full")
    assert (found.returncode, found.stderr) == (1, "lantern: error: No space left on device\n")
    found = called("bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("stream", "words", "code"),
    [
        (">&-", "methods", 0),
        *product(("2>&-", "2> /dev/full", "2> >(:)"), ("methods nowhere", "nowhere"), [2]),
    ],
)
def test_a_stream_that_takes_nothing_stops_nothing(stream: str, words: str, code: int) -> None:
    line = "from lantern.cli.main import main; import sys; code = main(); "
    line += "sys.exit(code if sys.stdout.errors == sys.stderr.errors else 9)"
    found = called("bash", "-c", f"{sys.executable} -c '{line}' {words} {stream}")
    assert (found.returncode, found.stdout, found.stderr) == (code, "", "")


SETTINGS = {option.flag for option in find("bounded").options.values()}


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("lantern ", set(COMMANDS), set()),
        ("lantern generate --method lantern --", {"--k", "--delta", "--prompt"}, set()),
        ("lantern-generate --method bounded --", SETTINGS, set()),
        ("lantern-generate --method plain --", {"--prompt"}, {"--delta"}),
        ("lantern-generate --method ", set(METHODS), set()),
        ("lantern-generate --engine c", {"cpu"}, {"graph"}),
        ("lantern methods bounded-", {name for name in METHODS if name.startswith("bounded-")}, {"plain"}),
        ("lantern train ", set(STAGES), set()),
        ("lantern train policy --", {"--records"}, {"--vq"}),
        ("lantern train drafter --config drafter-e", {"drafter-eagle1", "drafter-eagle3"}, {"target-small"}),
        ("lantern train data --recipe ", {"emoji"}, set()),
        ("lantern train drafter --kind e", {"eagle1", "eagle3"}, {"c2t"}),
        ("lantern tune --methods eagle1 ea", {"eagle2"}, {"plain"}),
        ("lantern generate --set de", {"delta=", "depth="}, {"nodes="}),
    ],
)
def test_commands_options_and_names_are_completed(
    line: str, offered: set[str], not_offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would take file descriptor 9, which is pytest's
    monkeypatch.setattr("argcomplete.finders.CompletionFinder._init_debug_stream", lambda self: None)
    given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    for name, value in (given | {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_SHELL": "bash"}).items():
        monkeypatch.setenv(name, value)
    output, codes = io.StringIO(), list[int]()
    scripted = partial(CompletionFinder(), exit_method=codes.append, output_stream=output)
    monkeypatch.setattr("argcomplete.autocomplete", scripted)
    complete(line.split()[0])
    found = set(output.getvalue().split())
    assert codes == [0] and offered <= found and not not_offered & found


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed(shell: str, capsys: Capture) -> None:
    script = printed(capsys, "completion", shell)
    assert all(name in script for name in PROGRAMS) and "_ARGCOMPLETE" in script


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_a_word(tmp_path: Path) -> None:
    program = tmp_path / "lantern"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m lantern.cli.main\n")
    program.chmod(0o755)
    script = (
        'eval "$(lantern_script)"; COMP_WORDS=(lantern doct); COMP_LINE="lantern doct"; COMP_POINT=12; COMP_CWORD=1;'
        ' COMP_TYPE=9; _python_argcomplete lantern; echo "${COMPREPLY[@]}"'
    )
    define = f"lantern_script() {{ {sys.executable} -m lantern.cli.main completion bash; }};"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", define + script], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.split() == ["doctor"], done.stderr
