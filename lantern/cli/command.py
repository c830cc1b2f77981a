"""What a command is, how it is run, and how a failure becomes one line and an exit code.

0: success. 1: a failure of the environment (disk full, hub unreachable, package missing, out of memory).
2: invalid input (unknown option, bad value, damaged file).
129: the terminal was closed (SIGHUP). 130: interrupted by Ctrl-C. 143: terminated by SIGTERM.

A command is a function whose signature declares its options (`lantern.cli.options`).
"""

import argparse
import errno
import os
import sys
import traceback
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lantern import __version__
from lantern.core.config import install_hint, is_debugging, nearest, one_line
from lantern.core.signals import Stopped, Stopping

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, a function that adds its options, and `run`, which returns the exit code.

    is_brief: --help lists only the options outside of groups; --help-all lists all.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Namespace], int]
    is_brief: bool = False


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, naming the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        complain(message)
        sys.exit(REFUSED)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> Namespace:  # type: ignore[override]
        """Parse strictly; the error for an unknown option names the nearest valid one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = nearest(unknown[0].split("=")[0], options)
            if "--prompt" in options and not unknown[0].startswith("-"):
                near = "; a prompt is given with --prompt, in quotes"
            self.error(f"unknown argument {unknown[0][:80]!r}{near}")
        return parsed


class BriefHelp(argparse.Action):
    """--help of a command with many options: those of groups are left to --help-all."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the help and exit."""
        for group in parser._action_groups[2:]:  # the first two are argparse's own
            for action in group._group_actions:
                action.help = SUPPRESS
        parser.print_help()
        parser.exit()


def parser_of(command: Command, prog: str) -> Parser:
    """Return the parser of a command, with the options that all commands have."""
    usage = f"{prog} [OPTIONS]" if command.is_brief else None
    parser = Parser(prog=prog, description=command.summary, usage=usage, add_help=False, allow_abbrev=False)
    command.add_arguments(parser)
    add = parser.add_argument
    if command.is_brief:
        add("-h", "--help", action=BriefHelp, nargs=0, help="list the most used options")
        add("--help-all", action="help", help="list all options")
    else:
        add("-h", "--help", action="help", help="list the options")
    add("--version", action="version", version=f"lantern {__version__}", help="print the version")
    add("--debug", action="store_true", help="print tracebacks, and the layer that first gives NaN")
    return parser


def run_command(command: Command, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parse `argv` and run the command; a failure is printed as one line and becomes the exit code.

    With --debug a traceback comes first. `args.stopping` lets the command shield blocks from signals.
    """
    words = sys.argv[1:] if argv is None else argv
    is_debug = is_debugging() or "--debug" in words

    def run(stopping: Stopping) -> int:
        try:
            args = parser_of(command, prog or f"lantern-{command.name}").parse_args(words)
        except SystemExit as leaving:  # after --help, --version and an error that was printed
            return int(leaving.code or DONE)
        args.debug, args.stopping = is_debug, stopping
        return command.run(args)

    return contained(run, is_debug=is_debug)


def contained(run: Callable[[Stopping], int], *, is_debug: bool = False) -> int:
    """Return what `run` returns, once stdout is written; a failure is printed as one line and becomes the exit code.

    Whoever reads stdout may close it: that is no failure.
    """
    try:
        with Stopping() as stopping:
            code = run(stopping)
            if sys.stdout is not None:  # None: it was closed
                sys.stdout.flush()  # at exit a failure would become Python's own exit code, 120
            return code
    except KeyboardInterrupt as stopped:
        complain(str(stopped) or "interrupted")
        return stopped.code if isinstance(stopped, Stopped) else INTERRUPTED
    except Exception as error:  # the only place where failures become exit codes
        has_stdout = _flushed()
        if isinstance(error, BrokenPipeError) and not has_stdout:
            return DONE
        if is_debug:
            traceback.print_exc()
        complain(explained(error))
        return REFUSED if isinstance(error, ValueError) else FAILED


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"lantern: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _flushed() -> bool:
    """Return whether stdout can be written; otherwise what is left of it is dropped, so that exiting does not fail."""
    if sys.stdout is None:  # it was closed
        return True
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def explained(error: Exception) -> str:
    """Return the message of a failure as one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; {install_hint('eval,train')}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    is_clear = isinstance(error, ValueError | OSError | ImportError | FloatingPointError)
    if is_clear or (isinstance(error, MemoryError) and str(error)):
        return one_line(error, 2000)  # a command that it names is whole
    if isinstance(error, MemoryError | RuntimeError):
        from lantern.generation.generator import is_out_of_memory

        if is_out_of_memory(error):
            return f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)} (--debug prints a traceback)"


def check_folder(folder: Path) -> None:
    """Raise OSError if a folder cannot be written to or made."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("."))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))


def check_file(option: str, path: Path | None) -> None:
    """Raise ValueError if a file is a folder or its folder is missing, OSError if it cannot be written; None passes."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder, wanted a file")
    check_folder(path.parent)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")


def say(line: str, is_quiet: bool = False, name: str = "lantern") -> None:
    """Print a line on stderr, after `name` and a colon, unless `is_quiet`."""
    if not is_quiet:
        print(f"{name}: {line}", file=sys.stderr, flush=True)
