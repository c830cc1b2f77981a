"""The axes of a frontier (gains and measures of quality), and the Pareto front of points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """A measure of points. `label` is the axis label; `digits` is the number of shown decimals."""

    name: str
    label: str
    is_lower_better: bool
    digits: int = 3

    def cost(self, value: float) -> float:
        """Return the value with its sign changed, if needed, so that lower is better."""
        return value if self.is_lower_better else -value

    def shown(self, value: float) -> str:
        """Return the value as text for tables."""
        return f"{value:.{self.digits}f}"


GAINS = (
    Axis("speedup", "wall-clock speedup over the fastest plain decoding", is_lower_better=False, digits=2),
    Axis("step_compression", "step compression τ (codes per target pass)", is_lower_better=False, digits=2),
)
QUALITY = {
    axis.name: axis
    for axis in (
        Axis("total-variation", "mean total variation (TV) to the model's own distribution, per code", True, 4),
        Axis("kid", "KID to real images (Inception)", True, 4),
        Axis("kid-efficientnet", "KID to real images (EfficientNet features)", True, 4),
        Axis("fid", "FID to real images (Inception)", True, 1),
        Axis("clip", "CLIP score (ViT-B/32, LANTERN's prefix)", False, 2),
        Axis("retrieval", "retrieval top-1 (EfficientNet, not CLIP)", False),
        Axis("likeness", "cosine to the nearest real image of the concept (EfficientNet)", False),
    )
}
FEW = 2048  # pictures below which a Frechet distance depends mainly on their number


def interval(found: Mapping[str, float], form: str, factor: float = 1) -> str:
    """Return a value times a factor, with its interval; the value alone where all images agree."""
    value, low, high = (form.format(factor * found[name]) for name in ("value", "low", "high"))
    return value if found["low"] == found["high"] else f"{value} ({low} to {high})"


def front(costs: Sequence[float], gains: Sequence[float]) -> list[bool]:
    """Return which points are on the front: no other point is at least as good in both and better in one.

        gains  3 |        b            a, b on the front; c costs as much as b and gains less;
               2 |        c            d costs more than a and gains no more
               1 |   a        d
                 +------------------ costs

    Equal points are on it together. ValueError for lists of different lengths.
    """
    points = list(zip(costs, gains, strict=True))
    return [not any(beats(other, one) for other in points) for one in points]


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether one (cost, gain) is at least as good as the other in both and better in one."""
    return one != other and one[0] <= other[0] and one[1] >= other[1]


def staircase(costs: Sequence[float], gains: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of the front as a staircase, from the lowest cost to the highest.

    Between two points the line is level and then rises.
    """
    chosen = [point for point, is_on in zip(zip(costs, gains, strict=True), front(costs, gains), strict=True) if is_on]
    corners: list[tuple[float, float]] = []
    for cost, gain in sorted(set(chosen)):
        if corners:
            corners.append((cost, corners[-1][1]))
        corners.append((cost, gain))
    return corners


def fronts(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Return the indices of points on the Pareto front of each gain against each axis of quality."""
    found: dict[str, dict[str, list[int]]] = {}
    for gain in GAINS:
        for axis in shared_axes(points):
            costs = [QUALITY[axis].cost(point["quality"][axis]["value"]) for point in points]
            is_on = front(costs, [point[gain.name]["value"] for point in points])
            found.setdefault(gain.name, {})[axis] = [number for number, on in enumerate(is_on) if on]
    return found


def shared_axes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the axes of quality that every point has."""
    return [name for name in QUALITY if all(name in point["quality"] for point in points)]
