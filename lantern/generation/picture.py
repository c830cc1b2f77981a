"""A finished picture and its statistics, of one picture and of a whole run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.generation.requests import Request


class NotFiniteError(FloatingPointError):
    """A distribution was NaN or infinite. `sound` are the pictures of the same batch that are not affected."""

    def __init__(self, message: str, sound: "Sequence[Picture]" = ()) -> None:
        super().__init__(message)
        self.sound = list(sound)


@dataclass(frozen=True)
class Statistics:
    """Statistics of one picture.

    `accepted[d]` of `reached[d]` steps accepted a drafted code at depth d + 1. `relaxed` is the share of codes that
    only a relaxation accepted, `total_variation` what it spent per code, `total_variation_max` the most that it spent
    on one code. `latent_distance` is the probability mass it moved times the L2 distance between the codes' vectors,
    per code; None where the model has no codebook. `seconds` are by phase; each picture of a batch has an equal share.
    """

    method: str
    is_exact: bool
    codes: int
    passes: int
    accepted: tuple[int, ...]
    reached: tuple[int, ...]
    relaxed: float
    total_variation: float
    total_variation_max: float
    latent_distance: float | None
    seconds: Mapping[str, float]

    @property
    def step_compression(self) -> float:
        """Codes per pass of the target."""
        return self.codes / max(self.passes, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            "method": self.method,
            "exact": self.is_exact,
            "codes": self.codes,
            "passes": self.passes,
            "step_compression": round(self.step_compression, 4),
            "accepted_by_depth": acceptance(self.accepted, self.reached),
            "relaxed_share": round(self.relaxed, 6),
            "total_variation": round(self.total_variation, 6),
            "total_variation_max": round(self.total_variation_max, 6),
            "latent_distance": None if self.latent_distance is None else round(self.latent_distance, 6),
            "seconds": {phase: round(value, 4) for phase, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class Picture:
    """A finished picture: its request, codes in raster order, pixels if they were requested, and statistics.

    `batch` is the number of pictures that were made at once.
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
        """Seconds from the start of the picture's batch to its end."""
        return sum(self.statistics.seconds.values()) * self.batch

    def as_dict(self) -> dict[str, Any]:
        """Return request and statistics as JSON values."""
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
        """SHA-256 of the codes as little-endian 32-bit integers."""
        return hashlib.sha256(self.codes.cpu().to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def acceptance(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """Return the share of steps that accepted a drafted code, by depth; None at a depth that no step reached."""
    return [round(yes / all_, 4) if all_ else None for yes, all_ in zip(accepted, reached, strict=True)]


def totals(done: Sequence[Statistics]) -> dict[str, Any]:
    """Return the statistics of several pictures of one method together."""
    codes, passes = sum(one.codes for one in done), sum(one.passes for one in done)
    depth = max(len(one.reached) for one in done)
    accepted = [sum(one.accepted[d] for one in done) for d in range(depth)]
    reached = [sum(one.reached[d] for one in done) for d in range(depth)]
    phases = done[0].seconds
    moved = [one.latent_distance * one.codes for one in done if one.latent_distance is not None]
    return {
        "exact": all(one.is_exact for one in done),
        "codes": codes,
        "passes": passes,
        "step_compression": round(codes / max(passes, 1), 4),
        "accepted_by_depth": acceptance(accepted, reached),
        "relaxed_share": round(sum(one.relaxed * one.codes for one in done) / codes, 6),
        "total_variation": round(sum(one.total_variation * one.codes for one in done) / codes, 6),
        "total_variation_max": round(max(one.total_variation_max for one in done), 6),
        "latent_distance": None if len(moved) < len(done) else round(sum(moved) / codes, 6),
        "seconds": {phase: round(sum(one.seconds[phase] for one in done), 4) for phase in phases},
    }
