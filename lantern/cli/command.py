"""What all commands share: a parser whose errors are one line, and the exit codes.

0: success. 1: a failure of the environment (disk full, hub unreachable, package missing, out of memory).
2: invalid input (unknown option, bad value, damaged file).
130: interrupted by Ctrl-C. 143: terminated by SIGTERM.
"""

import argparse
import difflib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lantern import __version__
from lantern.core.config import is_debugging, one_line
from lantern.core.signals import Stopping

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
# diffusers imports torchao if it is installed, and the import logs warnings about features that are not used here
CHATTY = ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree")


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, a function that adds its options, and `run`, which returns the exit code.

    `add_late` adds options that depend on the arguments.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    add_late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, naming the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        complain(message)
        sys.exit(REFUSED)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse strictly; the error for an unknown option names the nearest valid one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {unknown[0][:80]!r}{nearest(unknown[0].split('=')[0], options)}")
        return parsed


def run_command(command: Command, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parse `argv` and run the command; a failure is printed as one line and becomes the exit code.

    With --debug a traceback comes first. `args.stopping` lets the command shield blocks from signals.
    """
    parser = Parser(
        prog=prog or f"lantern-{command.name}",
        description=command.summary,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--version", action="version", version=f"lantern {__version__}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks, and the layer that first gives NaN")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if command.add_late is not None:
            command.add_late(parser, argv)
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # --help, or an error already printed
        return int(leaving.code or DONE)
    except (ValueError, OSError) as error:  # of `add_late`, such as a model that cannot be read
        complain(explained(error))
        return REFUSED if isinstance(error, ValueError) else FAILED
    args.debug = args.debug or is_debugging()
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with Stopping() as args.stopping:
            return command.run(args)
    except KeyboardInterrupt as stopped:
        complain(str(stopped) or "interrupted")
        return int(getattr(stopped, "code", INTERRUPTED))
    except BrokenPipeError:
        _abandon_stdout()
        return FAILED
    except Exception as error:  # the only place where failures become exit codes
        if args.debug:
            traceback.print_exc()
        complain(explained(error))
        if isinstance(error, OSError):
            _abandon_stdout_if_full()
        return REFUSED if isinstance(error, ValueError) else FAILED


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or "" if none is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"lantern: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _abandon_stdout() -> None:
    """Suppress BrokenPipeError at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _abandon_stdout_if_full() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def explained(error: Exception) -> str:
    """Return the message of a failure as one line."""
    if isinstance(error, ModuleNotFoundError):
        return f'{error}; in the clone of lantern run: pip install ".[eval,train]"'
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
        return one_line(error)
    from lantern.generation.generator import is_out_of_memory

    if is_out_of_memory(error):
        return one_line(error) if isinstance(error, MemoryError) and str(error) else f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)} (--debug prints a traceback)"
