"""Being told to stop: Ctrl-C and SIGTERM end a command cleanly, and a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(KeyboardInterrupt):
    """Ends a command because of a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(WORDS[signal.Signals(number)])
        self.code = 128 + number


class Stopping:
    """While this context lasts the first SIGINT or SIGTERM raises Stopped, a second one ends the process at once.

    In a block under `shield` the first waits for the end of the block, so that what belongs together is done or not.
    Outside of the main thread, where no signal arrives, it does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._pending = self._shields = 0

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            # what the caller told us to ignore, as a shell does for jobs in the background, stays ignored
            heard = [number for number in WORDS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._stop) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Puts a signal off until the block is done."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self.check()

    def check(self) -> None:
        """Raises Stopped if a signal came that was put off, or whose exception went lost in foreign code."""
        if self._pending and not self._shields:
            raise Stopped(self._pending)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            # from now on the system itself acts, even where Python would not come to
            signal.signal(each, signal.SIG_DFL)
        self._pending = number
        if not self._shields:
            raise Stopped(number)
