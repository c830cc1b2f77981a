"""Progress of a generation: a bar on stderr, and the token grids while they fill."""

import sys
import time
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.core.types import Step
from lantern.generation.generator import Generator

INTERVAL = 0.1  # seconds between two reads from the device, or two calls by the C++ engine


class Progress:
    """A bar over the tokens of a run, shown only where stderr is a terminal.

    It is the callback of a generation of `pictures` images of `tokens` tokens each, within the context of its `bar`.
    Tokens of a batch that ran out of memory are subtracted when the next batch begins. Counts are read from the device
    at most ten times a second. `bar` is a bar of tqdm in place of its own.
    """

    def __init__(self, pictures: int, tokens: int, *, is_quiet: bool = False, bar: Any = None) -> None:
        from tqdm import tqdm

        # with disable=None tqdm shows the bar only if stderr is a terminal
        how: dict[str, Any] = {"disable": True if is_quiet else None, "leave": False, "dynamic_ncols": True}
        self.bar = tqdm(total=pictures * tokens, unit=" tokens", **how) if bar is None else bar
        self._tokens, self._done = tokens, 0
        self._known: Int[Tensor, " b"] | None = None
        self._steps, self._next = 0, 0.0

    def __call__(self, step: Step) -> bool | None:
        """Add one pass."""
        if self.bar.disable:
            return
        if step.index == 0:
            if self._known is not None and int(self._known.min()) >= self._tokens:  # sync
                self._done += len(self._known) * self._tokens
            self._next = 0.0
        self._known, self._steps = step.start + step.counts, step.index + 1
        if time.monotonic() >= self._next:
            self.show()
            self._next = time.monotonic() + INTERVAL

    def show(self) -> None:
        """Show the tokens of all passes so far: tokens per step of one image, finished and slowest of several."""
        if self._known is None:
            return
        known = self._known.tolist()  # sync
        if len(known) == 1:
            text = f"{known[0] / max(self._steps, 1):.2f} tokens per step"
        else:
            done = sum(count >= self._tokens for count in known)
            text = f"{done}/{len(known)} done, slowest {min(known)}/{self._tokens}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self._done + sum(known) - self.bar.n)

    def say(self, line: str) -> None:
        """Write a line on stderr, above the bar."""
        self.bar.write(line, file=sys.stderr)


class Canvas:
    """The token grids of a batch while they fill: `tokens` (b n), -1 where no token is known yet."""

    tokens: Int[Tensor, "b n"]

    def __init__(self, tokens: int) -> None:
        self._size = tokens
        self.tokens = torch.empty(0, tokens, dtype=torch.long)

    def add(self, step: Step) -> None:
        """Add the tokens of one pass; the first pass of a batch starts new grids."""
        if step.index == 0:
            self.tokens = torch.full((len(step.start), self._size), -1, device=step.tokens.device)
        is_new = torch.arange(step.tokens.shape[1], device=step.tokens.device) < step.counts[:, None]
        image, place = is_new.nonzero(as_tuple=True)
        self.tokens[image, step.start[image] + place] = step.tokens[image, place]

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
