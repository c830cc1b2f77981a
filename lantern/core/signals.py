"""SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command or a training cleanly; a second one ends the process at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if sys.platform != "win32":  # where a terminal that is closed sends no signal
    WORDS[signal.SIGHUP] = "terminal closed"


class Stopped(KeyboardInterrupt):
    """Ends a command because of a signal; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(WORDS[signal.Signals(number)])
        self.code = 128 + number


class Stopping:
    """Context in which the first of these signals raises Stopped, and a second one ends the process at once.

    In a block under `shield` the first signal takes effect at the end of the block, so that the block is done whole or
    not begun. A context within another begins with the check of that. Outside of the main thread, where Python delivers
    no signals, the context does nothing.
    """

    _entered: ClassVar[list["Stopping"]] = []  # in the main thread, the innermost last

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._pending = self._shields = 0

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            if self._entered:
                self._entered[-1].check()
            self._entered.append(self)
            # a signal that the caller ignores, as a shell does for background jobs, stays ignored
            handled = [number for number in WORDS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._stop) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._entered:
            self._entered.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._pending)

    @contextmanager
    def shield(self, *, raises: bool = True) -> Iterator[None]:
        """Delay a signal until the block is done; unless it `raises` then, until the next `check`."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if raises:
            self.check()

    def check(self) -> None:
        """Raise Stopped if a signal was delayed, or if foreign code, such as a `__del__`, swallowed its exception."""
        if self._pending and not self._shields:
            raise Stopped(self._pending)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            # the second signal gets the system's default action, which works even while Python code is blocked
            signal.signal(each, signal.SIG_DFL)
        self._pending = number
        self.check()
