"""From the rounds of a sweep to its points: speedup, step compression, price and quality, each with its interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.eval.axes import GAINS, QUALITY
from lantern.eval.distances import DRAWS, Estimate, mean_estimate
from lantern.eval.pareto import front
from lantern.eval.ratios import Spread, refusal, rounded

Round = Mapping[str, Any]


def records_of(rounds: Sequence[Round], contender: str) -> list[dict[str, Any]]:
    """What a contender made, round by round; rounds without it are left out."""
    return [entry["made"][contender] for entry in rounds if contender in entry["made"]]


def seconds_of(rounds: Sequence[Round], contender: str) -> list[float]:
    """Seconds of a contender, round by round."""
    return [record["seconds"] for record in records_of(rounds, contender)]


def fastest(rounds: Sequence[Round], contenders: Sequence[str]) -> str:
    """The contender of the least median."""
    return min(contenders, key=lambda name: median(seconds_of(rounds, name)))


def speedup(rounds: Sequence[Round], baseline: str, contender: str) -> Estimate:
    """Median seconds of the baseline over those of a contender; pictures are drawn anew for both sides together."""
    both = [entry["made"] for entry in rounds if baseline in entry["made"] and contender in entry["made"]]
    table = torch.tensor([[made[baseline]["seconds"], made[contender]["seconds"]] for made in both])
    return bootstrap(table.double(), lambda drawn: drawn[..., 0].quantile(0.5, -1) / drawn[..., 1].quantile(0.5, -1))


def step_compression(records: Sequence[Mapping[str, Any]], codes: int) -> Estimate:
    """Codes of all pictures over target passes of all pictures."""
    passes = torch.tensor([[record["passes"]] for record in records], dtype=torch.float64)
    return bootstrap(passes, lambda drawn: codes / drawn[..., 0].mean(-1))


def bootstrap(
    table: Float[Tensor, "n c"], statistic: Callable[[Float[Tensor, "*d n c"]], Float[Tensor, "*d"]], *, seed: int = 0
) -> Estimate:
    """A statistic of the rows of a table, with a 95 % interval by drawing rows with replacement."""
    picks = torch.randint(0, len(table), (DRAWS, len(table)), generator=torch.Generator().manual_seed(seed))
    found = statistic(table[picks])
    low, high = torch.quantile(found, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(statistic(table)), low, high, f"95 % bootstrap over pictures, {DRAWS} draws")


def point_figures(rounds: Sequence[Round], baseline: str, contender: str, codes: int) -> dict[str, Any]:
    """What was measured of a contender; its quality is "total-variation" alone until others are asked."""
    records = records_of(rounds, contender)
    sides = [Spread.of(seconds_of(rounds, name)) for name in (baseline, contender)]
    gain = speedup(rounds, baseline, contender)
    assert gain.low is not None and gain.high is not None
    moved = torch.tensor([record["total_variation"] / codes for record in records], dtype=torch.float64)
    return {
        "images": len(records),
        "seconds": sides[1].as_dict(),
        "speedup": as_dict(gain),
        "refusal": None if contender == baseline else refusal(sides[0], sides[1], (gain.low, gain.high), len(records)),
        "step_compression": as_dict(step_compression(records, codes)),
        "relaxed_share": rounded(sum(record["relaxed"] for record in records) / (codes * len(records))),
        "quality": {"total-variation": as_dict(mean_estimate(moved, seed=0))},
        "depths": by_depth(records),
    }


def by_depth(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each depth of the draft how often a node with children was reached, and how often one was accepted there."""
    sums = [
        [sum(column) for column in zip(*(r[name] for r in records), strict=True)] for name in ("reached", "accepted")
    ]
    return [{"reached": reached, "accepted": accepted} for reached, accepted in zip(*sums, strict=True) if reached]


def as_dict(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON has it."""
    return {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(estimate).items()}


def fronts(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Numbers of the points on the Pareto front of each gain against each axis of quality that all points have."""
    found: dict[str, dict[str, list[int]]] = {}
    for gain in GAINS:
        for axis in shared_axes(points):
            costs = [QUALITY[axis].cost(point["quality"][axis]["value"]) for point in points]
            is_on = front(costs, [point[gain.name]["value"] for point in points])
            found.setdefault(gain.name, {})[axis] = [number for number, on in enumerate(is_on) if on]
    return found


def shared_axes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The axes of quality that every point was judged by."""
    return [name for name in QUALITY if all(name in point["quality"] for point in points)]
