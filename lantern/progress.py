"""How far a generation is: a bar on stderr, and the code grids as they fill."""

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.generate import Decoder, draw_batches, finish_batch
from lantern.picture import Picture
from lantern.requests import Request
from lantern.soundness import NotFiniteError
from lantern.types import Generation, Step

INTERVAL = 0.1  # seconds between two looks at the device


def in_words(known: Sequence[int], codes: int, passes: int) -> str:
    """How far a batch is, in a few words: of one picture its codes a pass, of several who is done and who is last."""
    if len(known) == 1:
        return f"{known[0] / max(passes, 1):.2f} codes a pass"
    return f"{sum(count >= codes for count in known)}/{len(known)} done, slowest {min(known)}/{codes}"


class Progress:
    """A bar over the codes of a run, shown only where stderr is a terminal.

    Used as a context manager and as the callback of a generation of pictures of `codes` codes, `pictures` in all. A
    batch that memory did not suffice for is taken back when the next one begins. The device is asked at most ten times
    a second.
    """

    def __init__(self, pictures: int, codes: int, *, is_quiet: bool = False) -> None:
        from tqdm import tqdm

        # disable=None lets tqdm look whether stderr is a terminal
        self._bar: Any = tqdm(
            total=pictures * codes, unit=" codes", disable=True if is_quiet else None, leave=False, dynamic_ncols=True
        )
        self._codes, self._done = codes, 0
        self._known: Int[Tensor, " b"] | None = None
        self._next = 0.0

    def __call__(self, step: Step) -> None:
        """Takes notice of one pass."""
        if self._bar.disable:
            return
        if step.index == 0:
            self._begin()
        self._known = step.start + step.counts
        if time.monotonic() >= self._next:
            self._show(self._known.tolist(), step.index + 1)  # sync
            self._next = time.monotonic() + INTERVAL

    @property
    def text(self) -> str:
        """The bar as it stands."""
        return str(self._bar)

    def say(self, line: str) -> None:
        """Writes a line on stderr, above the bar."""
        self._bar.write(line, file=sys.stderr)

    def _begin(self) -> None:
        """Counts the pictures of the batch before, if it came to its end."""
        if self._known is not None and int(self._known.min()) >= self._codes:  # sync
            self._done += len(self._known) * self._codes
        self._known, self._next = None, 0.0

    def _show(self, known: list[int], passes: int) -> None:
        self._bar.set_postfix_str(in_words(known, self._codes, passes), refresh=False)
        self._bar.update(self._done + sum(known) - self._bar.n)

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
        self._size, self.passes_made = codes, 0
        self.codes = torch.empty(0, codes, dtype=torch.long)
        self._passes = torch.empty(0, dtype=torch.long)

    def add(self, step: Step) -> None:
        """Enters the codes of one pass; the first pass of a batch begins anew."""
        if step.index == 0:
            self.codes = torch.full((len(step.start), self._size), -1, device=step.codes.device)
            self._passes = torch.zeros_like(step.start)
        ahead = torch.arange(step.codes.shape[1], device=step.codes.device)
        is_good = ahead < step.counts[:, None]
        image, place = is_good.nonzero(as_tuple=True)
        self.codes[image, (step.start[:, None] + ahead)[image, place]] = step.codes[image, place]
        self._passes += step.counts > 0
        self.passes_made = step.index + 1

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Codes that each image has."""
        return (self.codes >= 0).sum(1)

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
        self._codes, self._done = pipe.transformer.config.block_size, 0
        self.canvas = Canvas(self._codes)

    @property
    def is_stopped(self) -> bool:
        """Whether the call is to end."""
        return bool(self._pipe.interrupt)

    def keep(self, pictures: int) -> None:
        """Takes notice that this many pictures are done, which only then count for good."""
        self._done += pictures * self._codes

    def __call__(self, step: Step) -> None:
        """Takes notice of one pass; raises Interrupted if the call is to end before the picture does."""
        self.canvas.add(step)
        known = self.canvas.known
        counts = known.tolist()  # sync
        self._bar.set_postfix_str(in_words(counts, self._codes, self.canvas.passes_made), refresh=False)
        self._bar.update(self._done + sum(counts) - self._bar.n)
        if self._callback is not None:
            seen = {"codes": self.canvas.codes, "known": known}
            self._callback(self._pipe, step.index, min(counts), {name: seen[name] for name in self._names})
        if self.is_stopped and min(counts) < self._codes:
            raise Interrupted


def draw_watched(decoder: Decoder, asked: Sequence[Request], watcher: Watcher, *, wants_pixels: bool) -> list[Picture]:
    """All pictures; interrupted, the last are as far as they got, code 0 in place of what is missing."""
    pictures: list[Picture] = []
    try:
        for made in draw_batches(decoder, asked, wants_pixels=wants_pixels, callback=watcher):
            pictures += made
            watcher.keep(len(made))
            if watcher.is_stopped:
                break
    except Interrupted:
        grids = watcher.canvas.generation()
        begun = asked[len(pictures) : len(pictures) + len(grids.codes)]
        pictures += finish_batch(decoder, begun, grids, seconds={}, wants_pixels=wants_pixels)
    except NotFiniteError as error:
        error.sound = pictures + error.sound
        raise
    return pictures
