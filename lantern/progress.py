"""How far a generation is: a bar on stderr, and the code grids as they fill."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.types import Generation, Step


class Progress:
    """Counts the codes of a run as steps report them; shown only where stderr is a terminal.

    Used as a context manager and as the callback of a generation.
    """

    def __init__(self, codes: int, *, is_quiet: bool = False) -> None:
        from tqdm import tqdm

        # disable=None lets tqdm look whether stderr is a terminal
        self._bar: Any = tqdm(total=codes, unit=" codes", disable=True if is_quiet else None, leave=False)
        self._codes = self._passes = 0

    def __call__(self, step: Step) -> None:
        """Takes notice of one pass."""
        if self._bar.disable:
            return
        counts = step.counts.tolist()  # sync
        self._codes += sum(counts)
        self._passes += sum(count > 0 for count in counts)
        self._bar.set_postfix_str(f"{self._codes / max(self._passes, 1):.2f} codes a pass", refresh=False)
        self._bar.update(sum(counts))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class Canvas:
    """The code grids of a batch as they fill: `codes` (b n), -1 where nothing is decided yet."""

    codes: Int[Tensor, "b n"]

    def __init__(self, codes: int) -> None:
        self._size, self._steps = codes, 0
        self.codes = torch.empty(0, codes, dtype=torch.long)
        self._passes = torch.empty(0, dtype=torch.long)

    def add(self, step: Step) -> None:
        """Enters the codes of one pass."""
        if not len(self.codes):
            self.codes = torch.full((len(step.start), self._size), -1, device=step.codes.device)
            self._passes = torch.zeros_like(step.start)
        ahead = torch.arange(step.codes.shape[1], device=step.codes.device)
        is_good = ahead < step.counts[:, None]
        image, place = is_good.nonzero(as_tuple=True)
        self.codes[image, (step.start[:, None] + ahead)[image, place]] = step.codes[image, place]
        self._passes += step.counts > 0

    @property
    def slowest(self) -> int:
        """Codes that every image has."""
        return int((self.codes >= 0).sum(1).min())

    @property
    def codes_a_pass(self) -> float:
        """Codes per pass so far."""
        return int((self.codes >= 0).sum()) / max(int(self._passes.sum()), 1)

    def generation(self) -> Generation:
        """What there is, as if it were finished: code 0 in place of what is missing."""
        none = torch.zeros(len(self.codes), 0, dtype=torch.long)
        free = torch.zeros(len(self.codes))
        return Generation(self.codes.clamp(min=0), self._passes, none, none, free, free.clone())


class Interrupted(Exception):
    """Leaves a generation because `pipe._interrupt` was set."""


class Watcher:
    """Sees every pass of a pipeline's call: moves its bar, calls the user's callback, stops when told to."""

    def __init__(self, pipe: Any, bar: Any, callback: Callable[..., Any] | None, names: Sequence[str]) -> None:
        self._pipe, self._bar, self._callback, self._names = pipe, bar, callback, names
        self.canvas = Canvas(pipe.transformer.config.block_size)

    def __call__(self, step: Step) -> None:
        """Takes notice of one pass; raises Interrupted if the call is to end before the picture does."""
        self.canvas.add(step)
        self._bar.update(int(step.counts.sum()))
        self._bar.set_postfix_str(f"{self.canvas.codes_a_pass:.2f} codes a pass", refresh=False)
        if self._callback is not None:
            seen = {"codes": self.canvas.codes}
            self._callback(self._pipe, step.index, self.canvas.slowest, {name: seen[name] for name in self._names})
        if self._pipe.interrupt and self.canvas.slowest < self.canvas.codes.shape[1]:
            raise Interrupted
