"""`lantern leaderboard` (or `python -m lantern.eval.boards.leaderboard`): every method, measured in one run.

All methods, and plain decoding in every variant that may be its fastest, make the same images in one process, in
interleaved rounds, at temperature 1 and again at temperature 0. The contenders of comparisons at equal budget
(`equal_budget`) take part in the first rounds. Each round is stored when it ends, so an interrupted run resumes.
`leaderboard_report` writes tables and plot from the result file without a model.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.eval.boards.axes import QUALITY
from lantern.eval.boards.contest import Contest, LeaderboardOptions, Setting, made_with
from lantern.eval.boards.equal_budget import DEEP, FIGURES, Beats, Claim
from lantern.eval.boards.plotting import reach
from lantern.eval.boards.rounds import (
    as_dict,
    by_depth,
    codes_ratio,
    fastest,
    name_of,
    pixels_of,
    point_figures,
    records_of,
    seconds_of,
    speedup,
    unpack,
)
from lantern.eval.metrics.distances import Estimate, bootstrap
from lantern.eval.speed.contenders import PLAIN, method_of
from lantern.eval.speed.race import Spread, rounded
from lantern.methods.registry import METHODS, Method
from lantern.models.folder import Model

if TYPE_CHECKING:
    from lantern.eval.boards.judge import Judge

RoundList = Sequence[Mapping[str, Any]]
# promises of methods: plain decoding's codes, its distribution, or a reported total variation
CODES, DISTRIBUTION, RELAXED = "codes", "distribution", "relaxed"


class Leaderboard:
    """One contest per temperature. ValueError for invalid methods or a folder of another run."""

    def __init__(self, options: LeaderboardOptions) -> None:
        self.options, self.setting = options, Setting(options)
        self.contests = [
            Contest(self.setting, temperature, images, claims=0 if number else options.equal_budget)
            for number, (temperature, images) in enumerate(zip(options.temperatures, options.images, strict=True))
        ]

    @property
    def model(self) -> Model:
        """The model."""
        return self.setting.model

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the first temperature."""
        return self.contests[0].sampling

    def measure(self) -> None:
        """Run everything that is missing."""
        for contest in self.contests:
            contest.measure()

    def figures(self, judge: "Judge | None" = None, *, least: int = 2) -> dict[str, Any]:
        """Return all figures for JSON; the judge is used at temperatures with `least` images or more."""
        contests = [ContestFigures(one, judge if one.images >= least else None).as_dict() for one in self.contests]
        return {
            "what": "leaderboard",
            **self.setting.header,
            "surroundings": self.setting.surroundings,
            "prompts": {
                "sha256": self.setting.header["prompts"],
                "used": [self.setting.prompt(number) for number in range(max(self.options.images))],
            },
            "judges": judge.facts if judge else {},
            "contests": contests,
            "equal_budget": claim_figures(self.contests[0]),
            "failures": broken_promises(contests),
        }


def promise_of(method: Method, *, is_greedy: bool) -> str:
    """Return the promise of a method; at temperature 0 an exact method promises codes."""
    if not method.exact:
        return RELAXED
    return CODES if method.spec.promise == "codes" or is_greedy else DISTRIBUTION


class ContestFigures:
    """The figures of a finished contest. A judge, if given, computes the quality of each contender once."""

    def __init__(self, contest: Contest, judge: "Judge | None") -> None:
        self.contest, self.judge = contest, judge
        self.rounds = contest.folder.rounds(contest.images)
        self.every = list(self.rounds.values())
        names = [name_of(PLAIN, one) for one in contest.setting.plain_variants]
        self.plain = [name for name in names if records_of(self.every, name)]
        self.baseline = fastest(self.every, self.plain)
        self._known: dict[str, dict[str, Estimate]] = {}

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        contest, every = self.contest, self.every
        drawn = ("guidance", "temperature", "top_k", "top_p")
        plain = self.estimates(contest.plain_name)
        return {
            "temperature": contest.temperature,
            "sampling": {name: getattr(contest.sampling, name) for name in drawn},
            "images": len(every),
            "is_bitwise": contest.setting.options.variant.dtype == "fp32",
            "baseline": self.baseline,
            "plain": {name: Spread.of(seconds_of(every, name)).as_dict() for name in self.plain},
            # differences of two sets of plain images by chance
            "yardstick": {axis: as_dict(change(value, value)) for axis, value in plain.items()},
            "commits": list(dict.fromkeys(entry["commit"] for entry in every)),
            "load_average": [entry["load"]["before"] for entry in every],
            "rows": [self.row(spec) for spec in (PLAIN, *contest.setting.specs)],
            "absent_plain": [one for one in contest.absent if one["method"] == PLAIN],
        }

    def row(self, spec: str) -> dict[str, Any]:
        """Return the row of a method, or of plain decoding in the methods' engine: its figures, or why it has none.

        `speedup` is over the fastest plain decoding, `speedup_alike` over that in the engine of the methods.
        """
        contest, setting, is_plain = self.contest, self.contest.setting, spec == PLAIN
        method = METHODS[PLAIN] if is_plain else method_of(setting.model, spec)
        promise = promise_of(method, is_greedy=contest.sampling.is_greedy)
        facts: dict[str, Any] = {"method": spec, "status": "measured", "promise": promise, "summary": method.summary}
        name, variant = contest.name(spec), setting.options.variant
        records = records_of(self.every, name)
        if not records:
            lacking = {"status": "failed", "reason": "no rounds"}
            why = next((one for one in contest.absent if one["method"] == spec), lacking)
            return facts | {key: why[key] for key in ("status", "reason", "command") if key in why}
        num_steps = sum(record["steps"] for record in records)
        found = facts | point_figures(self.every, self.baseline, name, setting.model.target.config.block_size)
        found |= {
            "speedup_alike": as_dict(speedup(self.every, contest.plain_name, name)),
            "nodes_per_pass": rounded(sum(record["nodes"] for record in records) / max(num_steps, 1)),
            "probe": contest.probes[name],
            "made_with": made_with(setting.stable.model(variant), spec, variant),
        }
        if promise == CODES and not is_plain:
            found["identity"] = self.identity(name)
        if promise == RELAXED or is_plain:
            found["quality"] |= {axis: as_dict(value) for axis, value in self.estimates(name).items()}
        if promise == RELAXED:
            found["changes"] = self.changes(name)
        return found

    def identity(self, name: str) -> dict[str, int]:
        """Count images and codes that differ from plain decoding in the same engine."""
        plain = self.contest.plain_name
        both = [entry["made"] for entry in self.every if name in entry["made"] and plain in entry["made"]]
        mine, its = (unpack([made[who]["codes"] for made in both]) for who in (name, plain))
        differing = (mine != its).sum(1)
        return {
            "images": len(both),
            "codes": mine.numel(),
            "differing_images": int((differing > 0).sum()),
            "differing_codes": int(differing.sum()),
        }

    def estimates(self, name: str) -> dict[str, Estimate]:
        """Return the quality of a contender's images by axis; empty without a judge."""
        if self.judge is not None and name not in self._known:
            setting = self.contest.setting
            made = {n: entry["made"][name] for n, entry in self.rounds.items() if name in entry["made"]}
            pictures = pixels_of(setting.model, unpack([one["codes"] for one in made.values()]))
            found = self.judge.estimates(pictures, [setting.prompt(number) for number in made])
            self._known[name] = {axis: value for axis, value in found.items() if axis in QUALITY and axis != "fid"}
        return self._known.get(name, {})

    def changes(self, name: str) -> dict[str, Any]:
        """Return the changes from plain decoding, and whether chance explains them (`is_within`)."""
        found = {}
        for axis, value in self.estimates(name).items():
            plain = self.estimates(self.contest.plain_name)[axis]
            found_change, by_chance = change(value, plain), math.hypot(*reach(vars(plain)))
            found[axis] = as_dict(found_change) | {"is_within": abs(found_change.value) <= by_chance}
        return found


def change(mine: Estimate, plain: Estimate) -> Estimate:
    """Return the difference of two estimates, with an interval from theirs (Zou and Donner 2008, equation 2).

    For plain decoding and itself it is the difference of two sets of its images by chance.
    """
    value, (below, above), (its_below, its_above) = mine.value - plain.value, reach(vars(mine)), reach(vars(plain))
    low, high = value - math.hypot(below, its_above), value + math.hypot(above, its_below)
    return Estimate(value, low, high, "95 %, from the intervals of both")


def broken_promises(contests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per failed method and, in fp32, per method whose codes differ from those it promises."""
    found = []
    for contest in contests:
        at = f"at temperature {contest['temperature']:g}"
        for one in contest["rows"]:
            if one["status"] == "failed":
                found.append(f"{one['method']} failed {at}: {one['reason']}")
            differing = one.get("identity", {}).get("differing_images", 0)
            if differing and contest["is_bitwise"]:
                found.append(f"{one['method']} differs from plain decoding {at} in {differing} images")
    return found


LEAST_ROUNDS = 3  # fewer rounds give no claim


def claim_figures(contest: Contest) -> list[dict[str, Any]]:
    """Return every claim for JSON: the figures of its contenders and the outcome of each test."""
    rounds = list(contest.folder.rounds(contest.equal).values())
    codes = contest.setting.model.target.config.block_size
    found = []
    for claim in contest.claims:
        there = [spec for spec in claim.contenders if records_of(rounds, contest.name(spec))]
        entries = {spec: entry_figures(contest, rounds, spec, codes) for spec in there}
        found.append(
            {
                "method": claim.method,
                "says": claim.statement,
                "figures": list(claim.figures),
                "images": len(rounds),
                "entries": [{"spec": spec} | figures for spec, figures in entries.items()],
                "missing": [spec for spec in claim.contenders if spec not in there],
                "tests": [outcome(test, claim, entries, contest, rounds) for test in claim.tests],
            }
        )
    return found


def entry_figures(contest: Contest, rounds: RoundList, spec: str, codes: int) -> dict[str, float | None]:
    """Return the figures of a contender over the rounds at equal budget; figures of passes are from its probe."""
    name = contest.name(spec)
    records, seconds, known = records_of(rounds, name), median(seconds_of(rounds, name)), contest.probes[name]
    taken, reached = late(records)
    found = {
        "step_compression": codes * len(records) / sum(one["passes"] for one in records),
        "seconds": seconds,
        "codes_per_second": codes / seconds,
        "nodes_per_pass": sum(one["nodes"] for one in records) / max(sum(one["steps"] for one in records), 1),
        "late_acceptance": taken / reached if reached else None,
    }
    found |= {name: known.get(name) for name in FIGURES if name not in found}
    return {name: None if found[name] is None else rounded(found[name]) for name in FIGURES}


def late(records: RoundList) -> tuple[int, int]:
    """Return how often a late draft was accepted and how often one was tested."""
    deep = by_depth(records)[DEEP:]
    return sum(one["accepted"] for one in deep), sum(one["reached"] for one in deep)


def outcome(
    test: Beats,
    claim: Claim,
    entries: Mapping[str, Mapping[str, float | None]],
    contest: Contest,
    rounds: RoundList,
) -> dict[str, Any]:
    """Return the outcome of a test: ratio of the claimant's figure to the best other's, with an interval if known."""
    figure, sign = test.figure, 1 if test.more else -1
    others = {spec: entries[spec][figure] for spec in claim.specs[1:] if spec in entries}
    known = {spec: value for spec, value in others.items() if value is not None}
    mine = entries.get(claim.specs[0], {}).get(figure)
    reported = {"figure": figure, "wanted": "more" if test.more else "less", "best_other": None, "ratio": None}
    if mine is None or not known:
        return reported | {"outcome": "not measured"}
    best = max(known, key=lambda spec: sign * known[spec])
    ratio = ratio_of(figure, contest.name(claim.specs[0]), contest.name(best), rounds)
    ratio = ratio or Estimate(mine / known[best] if known[best] else float(mine == known[best]))
    is_reported = ratio.low is None or len(rounds) >= LEAST_ROUNDS
    return reported | {
        "best_other": best,
        "ratio": as_dict(ratio),
        "outcome": verdict(ratio, test.more) if is_reported else "open",
    }


def ratio_of(figure: str, mine: str, other: str, rounds: RoundList) -> Estimate | None:
    """Return the ratio of a figure with a bootstrap interval; None for figures of a probe."""
    if figure in ("seconds", "codes_per_second"):
        return speedup(rounds, *((mine, other) if figure == "seconds" else (other, mine)))
    if figure not in ("step_compression", "late_acceptance"):
        return None
    both = [[one["made"][name] for one in rounds] for name in (mine, other)]
    if figure == "step_compression":
        return codes_ratio(*both)
    table = torch.tensor([[*late([one]), *late([its])] for one, its in zip(*both, strict=True)]).double()
    if not (table.sum(0)[1:] > 0).all():
        return None
    return bootstrap(table, _late_ratio, seed=0)


def _late_ratio(sampled: Float[Tensor, "*d n 4"]) -> Float[Tensor, "*d"]:
    taken, reached, other_taken, other_reached = sampled.mean(-2).clamp(min=1e-9).unbind(-1)
    return (taken / reached) / (other_taken / other_reached)


def verdict(ratio: Estimate, more: bool) -> str:
    """Return the verdict on a claim: "holds", "fails", or "open" if the interval contains 1."""
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        return "open"
    return "holds" if (ratio.value > 1 if more else ratio.value < 1) else "fails"


if __name__ == "__main__":
    from lantern.cli.leaderboard import main

    sys.exit(main())
