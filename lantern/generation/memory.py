"""Running out of memory: recognising it on CPUs and GPUs, releasing memory, and halving the batch."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lantern.core.config import one_line

Requested = TypeVar("Requested")
Made = TypeVar("Made")

# torch raises RuntimeError for all of these, so only the text identifies them
SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory ran out: Python's, a GPU's, or that of torch's CPU allocator.

    On Linux a process that overcommits may be killed instead; then there is no error to catch.
    """
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in SIGNS)


def release_memory() -> None:
    """Release unreferenced memory; call it outside of the `except` block, which keeps frames alive."""
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def warn_of_halving(tried: int, fits: int) -> None:
    """Warn that fewer pictures are made at once than was requested."""
    warnings.warn(halving_message(tried, fits), RuntimeWarning, stacklevel=2)


def halving_message(tried: int, fits: int) -> str:
    """Return the message about a halved batch."""
    return f"out of memory with {tried} pictures at once: continuing with {fits}"


class BatchSize:
    """Number of pictures made at once. It is halved, permanently, each time memory runs out.

    After the first batch that fits, `report` is called with the size that did not fit and the one that does.
    """

    def __init__(self, size: int, report: Callable[[int, int], None] = warn_of_halving) -> None:
        self.now, self._report = size, report
        self._too_many = 0

    def halve(self, tried: int, error: BaseException) -> None:
        """Halve the size after memory ran out with `tried` pictures; MemoryError if that was a single one."""
        if tried < 2:
            raise MemoryError(f"out of memory with a single picture: {one_line(error)}") from error
        self._too_many = self._too_many or tried
        self.now = min(self.now, tried // 2)

    def confirm(self) -> None:
        """Report a halving once a batch has been made."""
        if self._too_many:
            self._report(self._too_many, self.now)
            self._too_many = 0


def in_batches(
    requested: Sequence[Requested],
    size: BatchSize,
    *,
    attempt: Callable[[Sequence[Requested]], Made],
    forget: Callable[[], None],
) -> Iterator[Made]:
    """Yield `attempt(batch)` for each batch of the requests; where memory runs out, retry with a smaller batch.

    `forget` drops references that a failed attempt may have left.
    """
    done = 0
    while done < len(requested):
        batch = requested[done : done + size.now]
        try:
            made = attempt(batch)
        except Exception as error:  # other errors are raised again
            if not is_out_of_memory(error):
                raise
            size.halve(len(batch), error)
        else:
            size.confirm()
            done += len(batch)
            yield made
            continue
        forget()
        release_memory()
