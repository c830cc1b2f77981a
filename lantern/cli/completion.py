"""`lantern completion SHELL`: prints the script with which a shell completes commands, options and names.

The script calls the program at each completion, so that the options offered are those of the chosen method or stage.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from importlib import import_module

from lantern.cli.command import OneOf, arg, command
from lantern.methods import METHODS

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("lantern", "lantern-generate")
EPILOG = 'bash: eval "$(lantern completion bash)"; zsh: the same; fish: lantern completion fish | source'


def completion(shell: str = arg(f"one of {', '.join(SHELLS)}", type=OneOf(SHELLS))) -> None:
    """Print the script with which a shell completes options and names."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(PROGRAMS, shell=shell))


def complete(program: str, commands: Mapping[str, str] | None = None) -> None:
    """Write the completions of the line that the shell's script has set to the file that it reads, and exit.

    `commands` are those of the program with a line of help each; without any it is the command that its name has after
    "lantern-".
    """
    import argcomplete

    words = os.environ["COMP_LINE"].split()[1:]
    root = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    if commands:
        parsers = root.add_subparsers()
        for name, summary in commands.items():
            parser = parsers.add_parser(name, help=summary, allow_abbrev=False)
            if words[:1] == [name]:
                _fill(parser, name, words[1:])
    else:
        _fill(root, program.removeprefix("lantern-"), words)
    argcomplete.autocomplete(root)


def _fill(parser: argparse.ArgumentParser, name: str, words: Sequence[str]) -> None:
    """Add the options of a command, with the settings of the method that the words name."""
    import_module(f"lantern.cli.{name}").COMMAND.add_arguments(parser)
    named = [METHODS[word] for word in words if word in METHODS]
    settings = {option.flag for method in named for option in method.options.values()}
    for action in parser._actions:
        if settings & set(action.option_strings):
            action.help = None  # it is not hidden


COMMAND = command(completion, epilog=EPILOG)
