"""A race: contenders make the same images in interleaved rounds; spreads, ratios and claims from their seconds."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.types import Generation, Step
from lantern.decoding.statistics import now
from lantern.eval.intervals import bootstrap
from lantern.eval.speed.contenders import METHOD_KINDS, PLAIN, Contender, Job, Lineup, Variant, warm_up

Result = TypeVar("Result")


class CutShort(KeyboardInterrupt):
    """Ends a measurement by a signal, its cause; `found` is what the whole rounds before it gave."""

    def __init__(self, found: Any) -> None:
        super().__init__("interrupted")
        self.found = found


def step_order(contenders: int, number: int) -> list[int]:
    """Return the order of contenders in round `number`: 0 1 2, then 1 2 0, then 2 0 1."""
    return [(number + place) % contenders for place in range(contenders)]


def interleave(
    runs: Sequence[Callable[[int], Result]],
    rounds: int,
    *,
    device: torch.device,
    after_round: Callable[[int], object] | None = None,
) -> tuple[list[list[float]], list[list[Result]]]:
    """Run each of `runs` once per round with the round number; return seconds and results by contender and round.

    Interleaving spreads slow phases of the machine over all contenders; the order rotates from round to round. A signal
    after the first round raises CutShort with those of the whole rounds.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    results: list[list[Result]] = [[] for _ in runs]
    whole = 0
    try:
        for number in range(rounds):
            for who in step_order(len(runs), number):
                begin = now(device)
                result = runs[who](number)
                seconds[who].append(now(device) - begin)
                results[who].append(result)
            whole = number + 1
            if after_round is not None:
                after_round(number)
    except KeyboardInterrupt as stop:
        if not whole:
            raise
        raise CutShort(([one[:whole] for one in seconds], [one[:whole] for one in results])) from stop
    return seconds, results


def report_rounds(report: Callable[[str], object], rounds: int) -> Callable[[int], object]:
    """Return a function that reports a round that is done, and the time that the others will take."""
    began = time.monotonic()

    def after_round(number: int) -> None:
        done = number + 1
        left = (time.monotonic() - began) / done * (rounds - done)
        report(f"round {done} of {rounds}" + (f", {left / 60:.1f} minutes left" if done < rounds else ""))

    return after_round


ENOUGH_IMAGES = 10
STEADY = 1.5  # largest p90 / p10 of a valid claim; above it the machine was too busy


@dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile of the seconds of several runs."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Return the spread of one or more runs, in seconds."""
        p10, p90 = np.quantile(seconds, (0.1, 0.9))
        return cls(median(seconds), float(p10), float(p90))

    @property
    def width(self) -> float:
        """p90 / p10: 1 on a quiet machine."""
        return self.p90 / max(self.p10, 1e-12)

    def as_dict(self) -> dict[str, float]:
        """The figures as JSON has them."""
        return {"median": rounded(self.median), "p10": rounded(self.p10), "p90": rounded(self.p90)}


@dataclass(frozen=True)
class Ratio:
    """Speedup over the baseline: seconds of the baseline over the method's own.

    `of_medians` is the ratio of the two medians; `of_rounds` is the median over rounds of the ratio within a round,
    with a 95 % bootstrap interval. `refusal` is the reason why no claim is made, or None; `claim` is then None.
    """

    of_medians: float
    of_rounds: float
    interval: tuple[float, float]
    refusal: str | None

    @property
    def claim(self) -> float | None:
        """The ratio of medians, or None if no claim is made."""
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
    """Compare seconds of the same rounds; `images` is the number per side, by default one per round."""
    ratios = [before / max(after, 1e-12) for before, after in zip(baseline, other, strict=True)]
    sides, interval = (Spread.of(baseline), Spread.of(other)), median_interval(ratios)
    return Ratio(
        of_medians=sides[0].median / max(sides[1].median, 1e-12),
        of_rounds=median(ratios),
        interval=interval,
        refusal=refusal(*sides, interval, len(ratios) if images is None else images),
    )


def refusal(baseline: Spread, other: Spread, interval: tuple[float, float], images: int) -> str | None:
    """Return why no claim can be made from these spreads, or None."""
    if images < ENOUGH_IMAGES:
        return f"no claim: {images} images each, expected at least {ENOUGH_IMAGES}"
    worst, name = max((baseline.width, "the baseline"), (other.width, "the method"))
    if worst > STEADY:
        return f"no claim: p90/p10 is {worst:.1f} for {name}, expected at most {STEADY}"
    low, high = interval
    if low <= 1 <= high:
        return f"no claim: the 95 % interval by rounds, {low:.2f} to {high:.2f}, contains 1"
    return None


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median over rounds; deterministic."""
    found = bootstrap(torch.tensor(values, dtype=torch.float64), lambda sampled: sampled.quantile(0.5, -1), seed=0)
    assert found.low is not None and found.high is not None
    return found.low, found.high


def rounded(value: float) -> float:
    """Round to five significant digits, as JSON results have them."""
    return float(f"{value:.5g}")


WARM_UP_PASSES = 6
RANKING_RUNS = 3  # short decodings of a variant, of which the first may compile


@dataclass(frozen=True)
class Made:
    """The result of a round: tokens and counters."""

    tokens: Int[Tensor, "b n"]
    steps: int
    moved: float
    relaxed: float

    @property
    def steps_per_image(self) -> float:
        """Passes per image."""
        return self.steps / max(len(self.tokens), 1)

    @classmethod
    def of(cls, generation: Generation) -> "Made":
        """Return the result of a generation, on the CPU."""
        tokens, steps = generation.tokens.cpu(), int(generation.steps.sum())
        return cls(tokens, steps, float(generation.total_variation.sum()), float(generation.relaxed.sum()))


@dataclass(frozen=True)
class Entry:
    """A contender with its seconds and results by round."""

    contender: Contender
    seconds: list[float]
    made: list[Made]

    @property
    def spread(self) -> Spread:
        """Spread of its seconds per round."""
        return Spread.of(self.seconds)

    def as_dict(self, batch: int) -> dict[str, Any]:
        """Return the figures for JSON; total variation and relaxed share are per token."""
        tokens = sum(made.tokens.numel() for made in self.made)
        return {
            "method": self.contender.label,
            "variant": self.contender.variant.kind,
            "dtype": self.contender.variant.dtype,
            "exact": self.contender.method.exact,
            "seconds": self.spread.as_dict(),
            "images_per_second": rounded(batch / self.spread.median),
            "tokens_per_step": rounded(tokens / max(sum(made.steps for made in self.made), 1)),
            "total_variation": rounded(sum(made.moved for made in self.made) / tokens),
            "relaxed_share": rounded(sum(made.relaxed for made in self.made) / tokens),
        }


class _WarmError(Exception):
    """Ends a warm-up generation early."""


def leave_out_slow(
    lineup: Lineup,
    job: Job,
    asked: Collection[str],
    *,
    device: torch.device,
    report: Callable[[str], object] = lambda text: None,
) -> None:
    """Rank the variants by short plain decodings, and remove the contenders of slow ones from the lineup.

    A variant is slow if a pass takes more than STEADY times that of the fastest, it is not one of the two fastest, and
    its kind is not in `asked`. The fastest plain decoding is therefore always measured in full.
    """
    spent: dict[Variant, float] = {}

    def rank(contender: Contender) -> None:
        spent[contender.variant] = min(pass_seconds(contender, job, device) for _ in range(RANKING_RUNS))

    plain = Lineup([one for one in lineup.contenders if one.is_plain], lineup.failed)
    warm_up(plain, rank, report)
    ordered = sorted(spent, key=spent.__getitem__)
    slow = [one for one in ordered[2:] if one.kind not in asked and spent[one] > STEADY * spent[ordered[0]]]
    failed = {one["variant"] for one in lineup.failed if one["method"] == PLAIN}
    lineup.slow += [{"variant": str(one), "pass_ms": rounded(1e3 * spent[one])} for one in slow]
    lineup.contenders = [
        one
        for one in lineup.contenders
        if one.variant not in slow and not (one.is_plain and str(one.variant) in failed)
    ]


def pass_seconds(contender: Contender, job: Job, device: torch.device) -> float:
    """Return the mean seconds of the first few passes after the prompt."""
    times: list[float] = []

    def watch(step: Step) -> None:
        times.append(now(device))
        if step.index >= WARM_UP_PASSES:
            raise _WarmError

    with suppress(_WarmError):
        contender.decode(job, callback=watch)
    return (times[-1] - times[0]) / max(len(times) - 1, 1)


def run_race(
    lineup: Lineup, jobs: Sequence[Job], *, device: torch.device, is_quiet: bool, asked: Collection[str] = METHOD_KINDS
) -> list[Entry]:
    """Warm up all contenders on every job, then time them in interleaved rounds; failed ones are dropped.

    Those in slow variants of other kinds than `asked` are left out (`leave_out_slow`). A signal after the first round
    raises CutShort with the entries of the whole rounds.
    """
    report = reporter(is_quiet)
    if any(one.variant.kind not in asked for one in lineup.contenders):
        report("ranking the variants of plain decoding")
        leave_out_slow(lineup, jobs[0], asked, device=device, report=report)
    warm_up(lineup, lambda contender: warm(contender, jobs), report)
    field = list(lineup.contenders)
    runs = [lambda number, one=one: Made.of(one.decode(jobs[number])) for one in field]

    def entries(seconds: list[list[float]], made: list[list[Made]]) -> list[Entry]:
        return [Entry(*of_one) for of_one in zip(field, seconds, made, strict=True)]

    try:
        return entries(*interleave(runs, len(jobs), device=device, after_round=report_rounds(report, len(jobs))))
    except CutShort as cut:
        raise CutShort(entries(*cut.found)) from cut.__cause__


def reporter(is_quiet: bool) -> Callable[[str], object]:
    """Return a function that prints a line to stderr, or nothing."""
    return (lambda text: None) if is_quiet else (lambda text: print(text, file=sys.stderr, flush=True))


def warm(contender: Contender, jobs: Sequence[Job]) -> None:
    """Decode the first job fully and start every other one, since each new shape may trigger compilation."""
    contender.decode(jobs[0])

    def stop(step: Step) -> None:
        if step.index >= WARM_UP_PASSES:
            raise _WarmError

    for job in jobs[1:]:
        with suppress(_WarmError):
            contender.decode(job, callback=stop)


def fastest(entries: Sequence[Entry]) -> Entry:
    """Return the entry with the smallest median."""
    return min(entries, key=lambda entry: entry.spread.median)


def results(entries: Sequence[Entry], batch: int) -> list[dict[str, Any]]:
    """Compare every method in its fastest variant with plain decoding in its fastest."""
    baseline = fastest([entry for entry in entries if entry.contender.is_plain])
    labels = dict.fromkeys(entry.contender.label for entry in entries if not entry.contender.is_plain)
    found = []
    for label in labels:
        best = fastest([entry for entry in entries if entry.contender.label == label])
        ratio = compare(baseline.seconds, best.seconds, images=batch * len(best.seconds))
        sides = {"method": label, "variant": str(best.contender.variant), "baseline": str(baseline.contender.variant)}
        found.append(sides | ratio.as_dict())
    return found


def identity(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Count tokens of exact methods that differ from plain decoding in the same variant.

    The count must be 0 in fp32 and where the engine keeps tokens (`Decoder.promise`). Elsewhere the distribution is the
    same, but rounding can change a token.
    """
    plain = {entry.contender.variant: entry for entry in entries if entry.contender.is_plain}
    found = []
    for entry in entries:
        oracle = plain.get(entry.contender.variant)
        if entry.contender.is_plain or not entry.contender.is_identical or oracle is None:
            continue
        pairs = list(zip(entry.made, oracle.made, strict=True))
        differing = [(mine.tokens != its.tokens).sum(1) for mine, its in pairs]
        promise = entry.contender.parts.promise(len(entry.made[0].tokens))
        found.append(
            {
                "method": entry.contender.label,
                "variant": str(entry.contender.variant),
                "images": sum(len(one) for one in differing),
                "differing_images": sum(int((one > 0).sum()) for one in differing),
                "differing_tokens": sum(int(one.sum()) for one in differing),
                "must_be_identical": entry.contender.variant.dtype == "fp32" or promise == "tokens",
            }
        )
    return found
