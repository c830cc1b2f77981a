"""Seconds of a step: the target's pass, drafting, and the rest, fitted to medians."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float

from lantern.core.config import build_config


@dataclass(frozen=True)
class Linear:
    """Seconds as `fixed` + `per_level` x depth of the tree + `per_node` x nodes."""

    fixed: float = 0.0
    per_level: float = 0.0
    per_node: float = 0.0

    def __call__(self, levels: int, nodes: int) -> float:
        """Return the seconds of a tree; the caller decides which nodes count."""
        return self.fixed + self.per_level * levels + self.per_node * nodes


@dataclass(frozen=True)
class Costs:
    """Seconds of one step of a method on one machine.

    `verify[n - 1]` is the target's pass over n nodes, the root included; `draft` counts the depth of the tree and the
    nodes that the drafter extends beside the root; `host` is everything else, by depth and nodes of the tree. It is
    at least `plain_host`, its value in plain decoding, since a drafted step does all the work of a plain one.
    ValueError for an empty `verify`.
    """

    verify: tuple[float, ...]
    draft: Linear
    host: Linear
    plain_host: float

    def __post_init__(self) -> None:
        if not self.verify:
            raise ValueError("verify is empty, wanted the seconds of the target's pass")

    @property
    def plain(self) -> float:
        """Seconds per token of plain decoding."""
        return self.verify[0] + self.plain_host

    def step(self, *, nodes: int, depth: int, inner: int) -> float:
        """Return the seconds of a step with a tree of `nodes` with the root, of which `inner` others have children."""
        return self.scored(nodes) + self.draft(depth, inner) + max(self.host(depth, nodes), self.plain_host)

    def scored(self, nodes: int) -> float:
        """Return the seconds of the target's pass, extrapolated linearly past the last measured size."""
        beyond = nodes - len(self.verify)
        if beyond <= 0 or len(self.verify) < 2:
            return self.verify[min(nodes, len(self.verify)) - 1]
        return self.verify[-1] + beyond * (self.verify[-1] - self.verify[-2])

    @classmethod
    def from_dict(cls, reported: Mapping[str, Any]) -> "Costs":
        """Read the value of `as_dict`; ValueError for anything else."""
        return build_config(cls, reported, source="costs of steps")

    def as_dict(self) -> dict[str, Any]:
        """Return the fits as JSON values, in seconds rounded to a tenth of a microsecond."""
        return {
            "verify": [round(seconds, 7) for seconds in self.verify],
            "draft": {name: round(value, 7) for name, value in asdict(self.draft).items()},
            "host": {name: round(value, 7) for name, value in asdict(self.host).items()},
            "plain_host": round(self.plain_host, 7),
        }


def costs_of(profile: Mapping[str, Any]) -> Costs:
    """Return the costs of steps with EAGLE-1's trees, or of the first method with costs; ValueError without any."""
    known = profile.get("costs")
    if not isinstance(known, dict) or not known:
        raise ValueError("the profile has no costs of drafted steps: tune with a method that drafts trees")
    return Costs.from_dict(known.get("eagle1") or next(iter(known.values())))


@dataclass(frozen=True)
class Laps:
    """Median seconds of the phases of a step with a tree of this size."""

    nodes: int
    depth: int
    inner: int
    verify: float
    draft: float
    step: float


def fit_costs(plain: Laps, laps: Sequence[Laps], *, verify: tuple[float, ...]) -> Costs:
    """Return the costs of a method from its laps with several trees; `verify` is the fit of the target's pass."""
    draft = fit_linear([(one.depth, one.inner) for one in laps], [one.draft for one in laps])
    rest = [max(one.step - one.verify - one.draft, 0.0) for one in laps]
    host = fit_linear([(one.depth, one.nodes) for one in laps], rest)
    return Costs(verify, draft, host, plain_host=max(plain.step - plain.verify, 0.0))


def fit_linear(sizes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> Linear:
    """Return the least-squares fit without negative terms, found by trying all subsets of the three terms."""
    features = np.array([(1.0, *size) for size in sizes])
    values = np.array(seconds)
    best, least = np.zeros(3), float((values**2).sum())
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(features[:, chosen], values, rcond=None)[0]
            error = float(((features[:, chosen] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return Linear(*map(float, best))


def fit_verify(medians: Mapping[int, float], most: int) -> tuple[float, ...]:
    """Return T_verify(n) for n = 1 .. most: a smooth non-decreasing curve through the pooled medians.

    Past the last measured n it is linear with the last slope.
    """
    sizes = np.array(sorted(medians), dtype=float)
    pooled = np.array(non_decreasing([medians[int(n)] for n in sizes]))
    slopes = _slopes(sizes, pooled)
    return tuple(_hermite(sizes, pooled, slopes, n) for n in range(1, most + 1))


def non_decreasing(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing values in least squares, by pooling neighbours that violate the order."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _slopes(x: Float[np.ndarray, " m"], y: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
    """Return slopes at the knots that keep a cubic monotone: harmonic means of the neighbouring secants."""
    if len(x) == 1:
        return np.zeros(1)
    secants = np.diff(y) / np.diff(x)
    slopes = np.concatenate([secants[:1], np.zeros(len(x) - 2), secants[-1:]])
    left, right = secants[:-1], secants[1:]
    rising = (left > 0) & (right > 0)
    slopes[1:-1][rising] = 2 / (1 / left[rising] + 1 / right[rising])
    return slopes


def _hermite(
    x: Float[np.ndarray, " m"], y: Float[np.ndarray, " m"], slopes: Float[np.ndarray, " m"], at: float
) -> float:
    if at <= x[0]:
        return float(y[0])
    if at >= x[-1]:
        return float(y[-1] + slopes[-1] * (at - x[-1]))
    i = int(np.searchsorted(x, at, side="right")) - 1
    width = x[i + 1] - x[i]
    t = (at - x[i]) / width
    start = y[i] * (1 + 2 * t) * (1 - t) ** 2 + width * slopes[i] * t * (1 - t) ** 2
    return float(start + y[i + 1] * t**2 * (3 - 2 * t) + width * slopes[i + 1] * t**2 * (t - 1))
