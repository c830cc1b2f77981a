"""Values with 95 % intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DRAWS = 1000
RESAMPLED = 1 << 22  # numbers that a block of resamples holds


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; without one the ends are NaN. `means` describes the interval."""

    value: float
    low: float = math.nan
    high: float = math.nan
    means: str = ""


def mean_estimate(values: Float[Tensor, " n"], *, seed: int, draws: int = DRAWS) -> Estimate:
    """Return the mean of values with its bootstrap interval."""
    return bootstrap(values.double(), lambda sampled: sampled.mean(-1), seed=seed, draws=draws)


def share_estimate(values: Bool[Tensor, " n"], *, draws: int = DRAWS) -> Estimate:
    """Return the share of true values with Wilson's interval, which is right for few values and near 0 and 1 too.

    Without `draws`, as elsewhere, it has no interval.
    """
    from scipy.stats import binomtest

    if not draws:
        return Estimate(float(values.double().mean()))
    found = binomtest(int(values.sum()), len(values)).proportion_ci(0.95, "wilson")
    return Estimate(float(values.double().mean()), float(found.low), float(found.high), "95 %, Wilson's")


def bootstrap(rows: Tensor, statistic: Callable[[Tensor], Tensor], *, seed: int, draws: int = DRAWS) -> Estimate:
    """Return a statistic of rows (one per image or round) with a 95 % percentile interval over resampled rows.

    `statistic` maps (..., n, *) to (...). Resamples are taken in blocks, so memory does not grow with n times `draws`.
    """
    if not draws:
        return Estimate(float(statistic(rows)))
    generator = torch.Generator().manual_seed(seed)
    size = max(RESAMPLED // rows.numel(), 1)
    found = []
    for first in range(0, draws, size):
        picks = torch.randint(0, len(rows), (min(size, draws - first), len(rows)), generator=generator)
        found.append(statistic(rows[picks]))
    low, high = ends(torch.cat(found))
    return Estimate(float(statistic(rows)), low, high, f"95 % bootstrap, {draws} draws")


def ends(found: Float[Tensor, " d"]) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of resamples."""
    low, high = torch.quantile(found.double(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
