"""A finished picture and what is told of it."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.requests import Request
from lantern.statistics import Statistics


@dataclass(frozen=True)
class Picture:
    """A finished picture: its codes in raster order, its pixels if they were asked for, and how it came about.

    `batch` is how many pictures were made at once with it.
    """

    request: Request
    codes: Int[Tensor, " n"]
    pixels: UInt8[Tensor, "h w 3"] | None
    statistics: Statistics
    batch: int = 1

    @property
    def grid(self) -> list[list[int]]:
        """The codes as rows of a square."""
        side = round(len(self.codes) ** 0.5)
        return self.codes.view(side, side).tolist()

    @property
    def latency(self) -> float:
        """Seconds from the beginning of its batch until it was there."""
        return sum(self.statistics.seconds.values()) * self.batch

    def as_dict(self) -> dict[str, Any]:
        """Its figures as JSON has them."""
        return self.statistics.as_dict() | {
            "prompt": self.request.prompt,
            "label": self.request.label,
            "seed": self.request.seed,
            "image": self.request.number,
            "tokens_sha256": self.tokens_sha256,
            "batch": self.batch,
            "latency": round(self.latency, 4),
        }

    @property
    def tokens_sha256(self) -> str:
        """Digest of the codes as little-endian 32-bit numbers: equal digests, equal codes."""
        return hashlib.sha256(self.codes.cpu().to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()
