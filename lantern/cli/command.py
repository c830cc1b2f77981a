"""What the commands share: a parser that answers in one line, and the exit codes.

0: done. 1: the surroundings failed (disk full, hub out of reach, package missing, out of memory).
2: the user asked for what cannot be (unknown option, bad value, damaged file).
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

from lantern.cli.stopping import Stopping
from lantern.config import one_line
from lantern.debugging import is_debugging
from lantern.memory import is_out_of_memory

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
# diffusers imports torchao where it finds it; both, and torch for them, then warn of parts that nobody asked for
CHATTY = ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree")


@dataclass(frozen=True)
class Command:
    """One command: its name, a line of help, how it fills a parser, and what runs; `run` returns the exit code."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, naming the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with code 2."""
        complain(message)
        sys.exit(REFUSED)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse strictly; an unknown option is answered with the nearest one there is."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {unknown[0][:80]!r}{nearest(unknown[0].split('=')[0], options)}")
        return parsed


def run_command(command: Command, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parse `argv` and run the command; every failure becomes one line and an exit code, after a traceback if --debug.

    The command finds in `args.stopping` how to shield what a signal must not cut in two.
    """
    parser = Parser(
        prog=prog or f"lantern-{command.name}",
        description=command.summary,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error arose, and which layer gave NaN")
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # --help, or a complaint already made
        return int(leaving.code or DONE)
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
    except Exception as error:  # the one place where failures become exit codes
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
    """Write one line on stderr, in the form of every error of every command."""
    print(f"lantern: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _abandon_stdout() -> None:
    """Keeps Python from complaining once more, at exit, that nobody takes our output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _abandon_stdout_if_full() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def explained(error: Exception) -> str:
    """What a failure is called in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f'{error}; in the clone of lantern run: pip install ".[eval,train]"'
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
        return one_line(error)
    if is_out_of_memory(error):
        return one_line(error) if isinstance(error, MemoryError) and str(error) else f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)} (--debug shows where)"
