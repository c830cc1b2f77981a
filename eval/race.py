"""A race: contenders make the same pictures in turn, and what comes of it is written down."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.eval.contenders import Contender, Job, Lineup, warm_up
from lantern.eval.ratios import Spread, compare, rounded
from lantern.eval.rounds import take_turns
from lantern.types import Generation, Step

WARM_UP_PASSES = 6


@dataclass(frozen=True)
class Made:
    """What is kept of a round: the codes, and the figures of each picture."""

    codes: Int[Tensor, "b n"]
    passes: int
    moved: float
    relaxed: float

    @classmethod
    def of(cls, generation: Generation) -> "Made":
        """From a generation, off the device."""
        codes, passes = generation.codes.cpu(), int(generation.passes.sum())
        return cls(codes, passes, float(generation.total_variation.sum()), float(generation.relaxed.sum()))


@dataclass(frozen=True)
class Entry:
    """A contender with its seconds and what it made, round by round."""

    contender: Contender
    seconds: list[float]
    made: list[Made]

    @property
    def spread(self) -> Spread:
        """Its seconds a round."""
        return Spread.of(self.seconds)

    def as_dict(self, batch: int) -> dict[str, Any]:
        """The figures as JSON has them; total variation and relaxed codes are per code."""
        codes = sum(made.codes.numel() for made in self.made)
        return {
            "method": self.contender.label,
            "variant": self.contender.variant.kind,
            "dtype": self.contender.variant.dtype,
            "exact": self.contender.method.exact,
            "seconds": self.spread.as_dict(),
            "images_per_second": rounded(batch / self.spread.median),
            "step_compression": rounded(codes / max(sum(made.passes for made in self.made), 1)),
            "total_variation": rounded(sum(made.moved for made in self.made) / codes),
            "relaxed_share": rounded(sum(made.relaxed for made in self.made) / codes),
        }


class _WarmError(Exception):
    """Leaves a generation once its machinery is warm."""


def run_race(lineup: Lineup, jobs: Sequence[Job], *, device: torch.device, is_quiet: bool) -> list[Entry]:
    """Warms everybody up on every job, then lets them take turns; contenders that fail in warming up are moved out."""
    tell: Callable[[str], object] = (lambda text: None) if is_quiet else (lambda text: print(text, file=sys.stderr))
    tell(f"warming up {len(lineup.contenders)} contenders")
    warm_up(lineup, lambda contender: warm(contender, jobs))
    field = list(lineup.contenders)
    runs = [lambda number, one=one: Made.of(one.decode(jobs[number])) for one in field]
    seconds, made = take_turns(
        runs, len(jobs), device=device, after_round=lambda number: tell(f"round {number + 1} of {len(jobs)}")
    )
    return [Entry(*of_one) for of_one in zip(field, seconds, made, strict=True)]


def warm(contender: Contender, jobs: Sequence[Job]) -> None:
    """Decodes the first job whole and begins every other, since a shape that is met first may be compiled first."""
    contender.decode(jobs[0])

    def stop(step: Step) -> None:
        if step.index >= WARM_UP_PASSES:
            raise _WarmError

    for job in jobs[1:]:
        try:
            contender.decode(job, callback=stop)
        except _WarmError:
            continue


def fastest(entries: Sequence[Entry]) -> Entry:
    """The one of the least median."""
    return min(entries, key=lambda entry: entry.spread.median)


def results(entries: Sequence[Entry], batch: int) -> list[dict[str, Any]]:
    """Every method in its fastest variant against plain decoding in its fastest."""
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
    """How many codes of the methods that promise plain decoding's differ from it, in the same variant.

    In fp32 there may be none, nor where the engine is reproducible. Elsewhere the law is the same, but rounding may
    decide between two codes.
    """
    plain = {entry.contender.variant: entry for entry in entries if entry.contender.is_plain}
    found = []
    for entry in entries:
        oracle = plain.get(entry.contender.variant)
        if entry.contender.is_plain or not entry.contender.is_identical or oracle is None:
            continue
        pairs = list(zip(entry.made, oracle.made, strict=True))
        differing = [(mine.codes != its.codes).sum(1) for mine, its in pairs]
        found.append(
            {
                "method": entry.contender.label,
                "variant": str(entry.contender.variant),
                "images": sum(len(one) for one in differing),
                "differing_images": sum(int((one > 0).sum()) for one in differing),
                "differing_codes": sum(int(one.sum()) for one in differing),
                "must_be_identical": entry.contender.variant.dtype == "fp32" or entry.contender.is_reproducible,
            }
        )
    return found
