"""A method compared with plain decoding: each image once both ways, in one process.

One run is no measurement: `lantern bench` measures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from lantern.core.sampling import Sampling
from lantern.core.types import Callback
from lantern.generation.generator import Generator, make_batch
from lantern.generation.images import Picture
from lantern.generation.requests import Request
from lantern.methods import METHODS, Method
from lantern.models.folder import Model


@dataclass(frozen=True)
class Comparison:
    """One image by plain decoding and by a method."""

    plain: Picture
    other: Picture

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of decoding by plain decoding and by the method."""
        return self.plain.statistics.seconds["decode"], self.other.statistics.seconds["decode"]

    @property
    def speedup(self) -> float:
        """Seconds of plain decoding divided by seconds of the method."""
        return self.seconds[0] / max(self.seconds[1], 1e-9)

    @property
    def differing(self) -> int:
        """Number of tokens that differ from plain decoding's."""
        return int((self.plain.tokens != self.other.tokens).sum())

    @property
    def sentence(self) -> str:
        """What happened in one sentence."""
        other = self.other.statistics
        if not self.differing:
            image = "The same image, token for token"
        elif other.promise == "distribution":
            image = "Another image of the same distribution"
        elif other.promise == "tokens":
            image = f"Another image by rounding: {self.differing} of {other.tokens} tokens differ"
        elif isnan(other.total_variation):
            image = "Another image: total variation not measured"
        else:
            image = f"Another image: total variation {other.total_variation:.2f} a token"
        return f"{image}, {self.speedup:.1f} times as fast in this run."

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        plain = self.plain.as_dict()
        return {
            **{name: plain.get(name) for name in ("prompt", "negative_prompt", "label", "seed", "image")},
            "plain": self.plain.statistics.as_dict() | {"tokens_sha256": self.plain.tokens_sha256},
            "method": self.other.statistics.as_dict() | {"tokens_sha256": self.other.tokens_sha256},
            "seconds": [round(seconds, 4) for seconds in self.seconds],
            "speedup": round(self.speedup, 4),
            "identical": not self.differing,
            "differing_tokens": self.differing,
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the comparison as a table: what is measured, of plain decoding, of the method."""
        plain, other = self.plain.statistics, self.other.statistics
        distance = other.latent_distance
        same = f"{self.differing} of {other.tokens} differ" if self.differing else "identical"
        return [
            ("", "plain", other.method),
            ("seconds of decoding", f"{self.seconds[0]:.2f}", f"{self.seconds[1]:.2f}"),
            ("steps", str(plain.steps), str(other.steps)),
            ("tokens per step", f"{plain.tokens_per_step:.2f}", f"{other.tokens_per_step:.2f}"),
            ("speedup of this run", "1.00x", f"{self.speedup:.2f}x"),
            ("relaxed tokens", "0.0 %", f"{100 * other.relaxed:.1f} %"),
            ("total variation per token", "0.000", f"{other.total_variation:.3f}"),
            ("largest total variation", "0.000", f"{other.total_variation_max:.3f}"),
            ("latent distance per token", "0.000", "unknown" if distance is None else f"{distance:.3f}"),
            ("tokens", "", same),
        ]

    def lines(self) -> list[str]:
        """Return the table as lines."""
        return [f"  {name:<24}{left:>10}  {right:>10}".rstrip() for name, left, right in self.rows()]


def compare(
    model: Model,
    requested: Sequence[Request],
    *,
    method: Method,
    sampling: Sampling,
    callback: Callback | None = None,
    interval: float = 0.0,
) -> Iterator[Comparison]:
    """Make each image by plain decoding, then by `method`, after a warm-up of both.

    `callback` and `interval` are those of `generator.generate`. ValueError for plain decoding against itself.
    """
    if method.is_plain:
        raise ValueError('nothing to compare with "plain": choose a method that drafts, and a model with a drafter')
    generators = [Generator(model, one, sampling, interval=interval) for one in (METHODS["plain"], method)]
    for generator in generators:
        generator.warm_up(requested[:1])

    def compared(request: Request) -> Comparison:
        return Comparison(*(make_batch(one, [request], with_pixels=True, callback=callback)[0] for one in generators))

    return map(compared, requested)
