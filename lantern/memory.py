"""Running out of memory: how it shows on CPUs and GPUs, and giving back what a failed attempt held."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lantern.config import one_line

Asked = TypeVar("Asked")
Made = TypeVar("Made")

# Everything but MemoryError comes as a RuntimeError, told apart by its text alone.
SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, a GPU's, or the allocator's of torch on a CPU.

    On Linux a process that overcommitted may be killed instead; nothing can be caught then.
    """
    if isinstance(error, MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in said for sign in SIGNS)


def release_memory() -> None:
    """Gives back what nothing refers to any more; call it outside of the `except` block, which keeps frames alive."""
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def warn_of_halving(tried: int, fits: int) -> None:
    """Says in a warning that fewer pictures are made at once than was asked for."""
    warnings.warn(halving_in_words(tried, fits), RuntimeWarning, stacklevel=2)


def halving_in_words(tried: int, fits: int) -> str:
    """What a halving is called in a message."""
    return f"out of memory with {tried} pictures at once: going on with {fits}"


class BatchSize:
    """How many pictures are made at once: halved, for good, each time that memory runs out.

    `tell` hears how many were too many and how many fit, once these are made.
    """

    def __init__(self, size: int, tell: Callable[[int, int], None] = warn_of_halving) -> None:
        self.now, self._tell = size, tell
        self._too_many = 0

    def halve(self, tried: int, error: BaseException) -> None:
        """Takes notice that memory ran out with `tried` pictures; MemoryError if that was a single one."""
        if tried < 2:
            raise MemoryError(f"out of memory with a single picture: {one_line(error)}") from error
        self._too_many = self._too_many or tried
        self.now = min(self.now, tried // 2)

    def settle(self) -> None:
        """Takes notice that a batch is done."""
        if self._too_many:
            self._tell(self._too_many, self.now)
            self._too_many = 0


def in_batches(
    asked: Sequence[Asked],
    size: BatchSize,
    *,
    attempt: Callable[[Sequence[Asked]], Made],
    forget: Callable[[], None],
) -> Iterator[Made]:
    """Makes what is asked for batch by batch; where memory runs out the same again, fewer at once.

    `forget` drops what a failed attempt may have left referred to.
    """
    done = 0
    while done < len(asked):
        some = asked[done : done + size.now]
        try:
            made = attempt(some)
        except Exception as error:  # what is not out of memory goes on
            if not is_out_of_memory(error):
                raise
            size.halve(len(some), error)
        else:
            size.settle()
            done += len(some)
            yield made
            continue
        forget()
        release_memory()
