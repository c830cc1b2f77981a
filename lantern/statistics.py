"""How pictures came about, in figures: of one picture, and of all of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """How one picture came about.

    `accepted[d]` of `reached[d]` steps took a drafted code at depth d + 1. `relaxed` codes were accepted only thanks
    to a relaxation, and `total_variation` is what it spent, both per code; `total_variation_max` is the most that it
    spent on one code, and `latent_distance` the mass it moved times the L2 distance between the codes' vectors, per
    code, None where the model has no codebook. Seconds are by phase, a batch's shared out among its pictures.
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
        """The figures as JSON has them."""
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


def acceptance(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """The share of steps that took a drafted code, by depth; None where no step came so deep."""
    return [round(yes / all_, 4) if all_ else None for yes, all_ in zip(accepted, reached, strict=True)]


def totals(done: Sequence[Statistics]) -> dict[str, Any]:
    """The figures of several pictures of one method together."""
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
