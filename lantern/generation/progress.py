"""Progress of a generation: a bar on stderr, and the token grids while they fill."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.core.types import Step
from lantern.generation.generator import Generator, make_batches
from lantern.generation.images import NotFiniteError, Picture
from lantern.generation.requests import Request

INTERVAL = 0.1  # seconds between two reads from the device


def describe_progress(known: Sequence[int], tokens: int, steps: int) -> str:
    """Return the progress of a batch as text: tokens per step of one image, finished and slowest of several."""
    if len(known) == 1:
        return f"{known[0] / max(steps, 1):.2f} tokens per step"
    return f"{sum(count >= tokens for count in known)}/{len(known)} done, slowest {min(known)}/{tokens}"


class Progress:
    """A bar over the tokens of a run, shown only where stderr is a terminal.

    It is a context manager and the callback of a generation of `pictures` images of `tokens` tokens each. Tokens of a
    batch that ran out of memory are subtracted when the next batch begins. Counts are read from the device at most ten
    times a second.
    """

    def __init__(self, pictures: int, tokens: int, *, is_quiet: bool = False) -> None:
        from tqdm import tqdm

        # with disable=None tqdm shows the bar only if stderr is a terminal
        self._bar: Any = tqdm(
            total=pictures * tokens, unit=" tokens", disable=True if is_quiet else None, leave=False, dynamic_ncols=True
        )
        self._tokens, self._done = tokens, 0
        self._known: Int[Tensor, " b"] | None = None
        self._next = 0.0

    def __call__(self, step: Step) -> None:
        """Add one pass."""
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
        """The bar as text."""
        return str(self._bar)

    def say(self, line: str) -> None:
        """Write a line on stderr, above the bar."""
        self._bar.write(line, file=sys.stderr)

    def _begin(self) -> None:
        """Count the images of the previous batch, if it was finished."""
        if self._known is not None and int(self._known.min()) >= self._tokens:  # sync
            self._done += len(self._known) * self._tokens
        self._known, self._next = None, 0.0

    def _show(self, known: list[int], steps: int) -> None:
        self._bar.set_postfix_str(describe_progress(known, self._tokens, steps), refresh=False)
        self._bar.update(self._done + sum(known) - self._bar.n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class Canvas:
    """The token grids of a batch while they fill: `tokens` (b n), -1 where no token is known yet."""

    tokens: Int[Tensor, "b n"]

    def __init__(self, tokens: int) -> None:
        self._size, self.steps_made = tokens, 0
        self.tokens = torch.empty(0, tokens, dtype=torch.long)

    def add(self, step: Step) -> None:
        """Add the tokens of one pass; the first pass of a batch starts new grids."""
        if step.index == 0:
            self.tokens = torch.full((len(step.start), self._size), -1, device=step.tokens.device)
        ahead = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        is_good = ahead < step.counts[:, None]
        image, place = is_good.nonzero(as_tuple=True)
        self.tokens[image, (step.start[:, None] + ahead)[image, place]] = step.tokens[image, place]
        self.steps_made = step.index + 1

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of known tokens of each image."""
        return (self.tokens >= 0).sum(1)


def partial_pixels(generator: Generator, tokens: Int[Tensor, " n"]) -> UInt8[Tensor, "h w 3"]:
    """Return the image of a grid in which some tokens are still -1: the rows below the last known token are grey."""
    raster = generator.model.target.config.raster
    known = int((tokens >= 0).sum())
    last = tokens[max(known - 1, 0)].clamp(min=0)
    pixels = generator.pixels(torch.where(tokens >= 0, tokens, last)[None])[0].clone()
    rows = -(-known // raster.columns) * (pixels.shape[0] // raster.rows)
    pixels[rows:] = 128
    return pixels


class Watcher:
    """Callback of a pipeline's call: updates the bar, calls the user's callback, and stops on `pipe._interrupt`."""

    def __init__(self, pipe: Any, bar: Any, callback: Callable[..., Any] | None, names: Sequence[str]) -> None:
        self._pipe, self._bar, self._callback, self._names = pipe, bar, callback, names
        self._tokens, self._done = pipe.transformer.config.block_size, 0
        self.canvas = Canvas(self._tokens)

    @property
    def is_stopped(self) -> bool:
        """Whether the call is to stop."""
        return bool(self._pipe.interrupt)

    def finish(self, pictures: int) -> None:
        """Count finished images."""
        self._done += pictures * self._tokens

    def __call__(self, step: Step) -> bool:
        """Add one pass; return whether the call is to stop."""
        self.canvas.add(step)
        known = self.canvas.known
        counts = known.tolist()  # sync
        self._bar.set_postfix_str(describe_progress(counts, self._tokens, self.canvas.steps_made), refresh=False)
        self._bar.update(self._done + sum(counts) - self._bar.n)
        if self._callback is not None:
            seen = {"tokens": self.canvas.tokens, "known": known}
            self._callback(self._pipe, step.index, min(counts), {name: seen[name] for name in self._names})
        return self.is_stopped


def make_watched(
    generator: Generator, requested: Sequence[Request], watcher: Watcher, *, with_pixels: bool
) -> list[Picture]:
    """Make all images; after an interruption those of the last batch have token 0 in place of missing tokens."""
    pictures: list[Picture] = []
    try:
        for made in make_batches(generator, requested, with_pixels=with_pixels, callback=watcher):
            pictures += made
            watcher.finish(len(made))
            if watcher.is_stopped:
                break
    except NotFiniteError as error:
        error.sound = pictures + error.sound
        raise
    return pictures
