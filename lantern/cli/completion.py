"""`lantern completion SHELL`: prints the script with which a shell completes commands, options and names.

The script calls the program at each completion, so that the options offered are those of the chosen method or stage.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

from lantern.cli.command import DONE, Command, Names

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("lantern", "lantern-generate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    parser.epilog = 'bash: eval "$(lantern completion bash)"; zsh: the same; fish: lantern completion fish | source'


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(PROGRAMS, shell=args.shell))
    return DONE


def complete(
    program: str,
    commands: Mapping[str, str] | None = None,
    *,
    output: TextIO | None = None,
    leave: Callable[[int], Any] = os._exit,
) -> None:
    """Write the completions of the line that the shell's script has set to `output`, and `leave`.

    `commands` are those of the program with a line of help each; without any it is the command that its name has after
    "lantern-". Without `output` the completions go to the file that the script reads.
    """
    import argcomplete

    words = os.environ["COMP_LINE"].split()[1:]
    argcomplete.autocomplete(parser_of(program, words, commands or {}), exit_method=leave, output_stream=output)


def parser_of(program: str, words: Sequence[str], commands: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser with the options that the words of a command line have so far."""
    root = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    if not commands:
        _fill(root, program.removeprefix("lantern-"), words)
        return root
    parsers = root.add_subparsers()
    for name, summary in commands.items():
        parser = parsers.add_parser(name, help=summary, allow_abbrev=False)
        if words[:1] == [name]:
            _fill(parser, name, words[1:])
    return root


def _fill(parser: argparse.ArgumentParser, name: str, words: Sequence[str]) -> None:
    command: Command = import_module(f"lantern.cli.{name}").COMMAND
    command.add_arguments(parser)
    if command.add_late is not None:
        with suppress(SystemExit, ValueError, OSError):  # of a line that is not complete yet
            command.add_late(parser, words)
    _complete_names(parser)


def _complete_names(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action.type, Names):
            action.completer = lambda names=action.type.names, **_: names  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_names(each)


COMMAND = Command("completion", "Print the script with which a shell completes options and names.", add_arguments, run)
