"""Shell completion: commands, options of the chosen method or stage, names; and the scripts of the shells."""

import io
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from argcomplete.finders import CompletionFinder

from lantern.cli.main import COMMANDS, PROGRAMS, SHELLS, complete, main
from lantern.methods import METHODS, find
from lantern.training.stages import STAGES
from tests.cli.calls import Capture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    # it would take file descriptor 9, which is pytest's
    monkeypatch.setattr("argcomplete.finders.CompletionFinder._init_debug_stream", lambda self: None)

    def complete_line(line: str) -> set[str]:
        given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        for name, value in (given | {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_SHELL": "bash"}).items():
            monkeypatch.setenv(name, value)
        output, codes = io.StringIO(), list[int]()
        scripted = partial(CompletionFinder(), exit_method=codes.append, output_stream=output)
        monkeypatch.setattr("argcomplete.autocomplete", scripted)
        complete(line.split()[0])
        assert codes == [0]
        return set(output.getvalue().split())

    return complete_line


SETTINGS = {option.flag for option in find("bounded").options.values()}


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("lantern ", set(COMMANDS), set()),
        ("lantern gen", {"generate"}, {"methods"}),
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
        ("lantern completion ", set(SHELLS), set()),
    ],
)
def test_commands_options_and_names_are_completed(completions, line, offered, not_offered) -> None:  # type: ignore[no-untyped-def]
    found = completions(line)
    assert offered <= found and not not_offered & found


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in PROGRAMS) and "_ARGCOMPLETE" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0


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
