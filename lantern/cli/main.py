"""`lantern COMMAND ...`: finds the command and runs it; and how shells complete its options and names.

The script of a shell calls the program at each completion, so that the options offered are those of the chosen method
or stage.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module

from lantern.cli.command import DONE, REFUSED, Command, OneOf, arg, command, complain, open_streams, run_command
from lantern.core.config import hint_for

COMMANDS = {  # where each is, in lantern/cli
    "generate": "generate:COMMAND",
    "methods": "methods:methods",
    "convert": "folders:convert",
    "assemble": "folders:assemble",
    "train": "train:COMMAND",
    "doctor": "doctor:doctor",
    "tune": "measure:tune",
    "eval": "measure:evaluate",
    "serve": "serve:serve",
    "demo": "serve:demo",
    "bench": "measure:bench",
    "reproduce": "measure:reproduce",
    "leaderboard": "measure:leaderboard",
    "completion": "main:completion",
}
PROGRAMS, SHELLS = ("lantern", "lantern-generate"), ("bash", "zsh", "fish")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `argv` defaults to the arguments of the process."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        complete("lantern")
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        with redirect_stdout(sys.stderr):
            run_command(LANTERN, ["--help"], prog="lantern")
        return REFUSED
    name = words[0]
    if name in COMMANDS:
        return run_command(find(name), words[1:], prog=f"lantern {name}")
    if name in ("-h", "--help", "-V", "--version"):
        return run_command(LANTERN, words[:1], prog="lantern")
    open_streams()
    unknown = f"unknown command {name[:40]!r}; {hint_for(name, COMMANDS)}"
    complain("a command comes before its options" if name.startswith("-") else unknown)
    return REFUSED


def find(name: str) -> Command:
    """Return one of COMMANDS."""
    module, _, place = COMMANDS[name].partition(":")
    return vars(import_module(f"lantern.cli.{module}"))[place]


def add_commands(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Add all commands, the one that the words begin with with its options."""
    parser.usage = "lantern COMMAND [OPTIONS]"
    parser.epilog = "lantern COMMAND --help lists the options of a command."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        one = commands.add_parser(name, help=find(name).summary, allow_abbrev=False)
        if words[:1] == [name]:
            add_options(one, name, words[1:])


def add_options(parser: argparse.ArgumentParser, name: str, words: Sequence[str]) -> None:
    """Add the options of a command, with the settings of the method that the words name."""
    from lantern.methods import METHODS

    find(name).add_arguments(parser)
    settings = {option.flag for word in words if word in METHODS for option in METHODS[word].options.values()}
    for action in parser._actions:
        if settings & set(action.option_strings):
            action.help = None  # it is not hidden


def complete(program: str) -> None:
    """Write the completions of the line that the shell's script has set to the file that it reads, and exit."""
    import argcomplete

    words, parser = os.environ["COMP_LINE"].split()[1:], argparse.ArgumentParser(prog=program, allow_abbrev=False)
    if program == "lantern":
        add_commands(parser, words)
    else:
        add_options(parser, program.removeprefix("lantern-"), words)
    argcomplete.autocomplete(parser)


@command
def completion(shell: str = arg(f"one of {', '.join(SHELLS)}", type=OneOf(SHELLS))) -> None:
    """Print the script with which bash, zsh or fish completes options and names.

    bash: eval "$(lantern completion bash)"; zsh: the same; fish: lantern completion fish | source
    """
    from argcomplete.shell_integration import shellcode

    print(shellcode(PROGRAMS, shell=shell))


SUMMARY = "Generate images with visual autoregressive models by speculative decoding; train and measure such models."
LANTERN = Command("lantern", SUMMARY, add_commands, lambda _: DONE)  # help and version end before

if __name__ == "__main__":
    sys.exit(main())
