"""What seconds of interleaved runs amount to: spreads, ratios, and whether they may be claimed at all."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ENOUGH_IMAGES = 10
STEADY = 1.5  # p90 over p10 beyond which a machine was too busy for a claim
RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile of the seconds of several runs."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """The spread of at least one run."""
        return cls(median(seconds), quantile(seconds, 0.1), quantile(seconds, 0.9))

    @property
    def width(self) -> float:
        """p90 over p10: 1 on a perfectly quiet machine."""
        return self.p90 / max(self.p10, 1e-12)

    def as_dict(self) -> dict[str, float]:
        """The figures as JSON has them."""
        return {"median": rounded(self.median), "p10": rounded(self.p10), "p90": rounded(self.p90)}


@dataclass(frozen=True)
class Ratio:
    """How many times faster one side was than the baseline: seconds of the baseline over its own.

    `of_medians` compares the two medians, `of_rounds` is the median over rounds of the ratio within a round, with a
    bootstrap interval of 95 %. `refusal` says in words why nothing may be claimed; `claim` is then None.
    """

    of_medians: float
    of_rounds: float
    interval: tuple[float, float]
    refusal: str | None

    @property
    def claim(self) -> float | None:
        """The ratio of medians, if it may be claimed."""
        return None if self.refusal else rounded(self.of_medians)

    def as_dict(self) -> dict[str, object]:
        """The figures as JSON has them."""
        return {
            "ratio_of_medians": rounded(self.of_medians),
            "median_of_ratios": rounded(self.of_rounds),
            "interval_95": [rounded(bound) for bound in self.interval],
            "claim": self.claim,
            "refusal": self.refusal,
        }


def compare(baseline: Sequence[float], other: Sequence[float], *, images: int | None = None) -> Ratio:
    """Compares seconds of the same rounds; `images` is how many were made on each side, one a round by default."""
    ratios = [before / max(after, 1e-12) for before, after in zip(baseline, other, strict=True)]
    sides, interval = (Spread.of(baseline), Spread.of(other)), bootstrap(ratios)
    return Ratio(
        of_medians=sides[0].median / max(sides[1].median, 1e-12),
        of_rounds=median(ratios),
        interval=interval,
        refusal=refusal(*sides, interval, len(ratios) if images is None else images),
    )


def refusal(baseline: Spread, other: Spread, interval: tuple[float, float], images: int) -> str | None:
    """Why a ratio of these may not be claimed, or None."""
    if images < ENOUGH_IMAGES:
        return f"no claim: {images} images each, wanted at least {ENOUGH_IMAGES}"
    worst, name = max((baseline.width, "the baseline"), (other.width, "the method"))
    if worst > STEADY:
        return f"no claim: p90/p10 is {worst:.1f} for {name}, wanted at most {STEADY}"
    low, high = interval
    if low <= 1 <= high:
        return f"no claim: {low:.2f} to {high:.2f} times by rounds (95 %), which may be either side of 1"
    return None


def bootstrap(ratios: Sequence[float], *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """A 95 % interval of the median, by drawing rounds with replacement; the same for the same ratios."""
    source = random.Random(0)
    medians = [median(source.choices(ratios, k=len(ratios))) for _ in range(resamples)]
    return quantile(medians, 0.025), quantile(medians, 0.975)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile by linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def rounded(value: float) -> float:
    """Five significant digits: what JSON carries."""
    return float(f"{value:.5g}")
