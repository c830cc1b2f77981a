"""Seconds and acceptance of real generations, cut short where a few steps say enough."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lantern.catalog import METHODS, Method
from lantern.generate import Decoder
from lantern.model_folder import Model
from lantern.requests import Request
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, grown, named
from lantern.tuning.acceptance import Tally, probing_tree
from lantern.tuning.costs import Laps
from lantern.types import DraftTree, Scores, Step

WARM_UP = 3  # steps of each run that are not counted
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class _EnoughError(Exception):
    """Leaves a generation once enough steps were seen."""


@dataclass(frozen=True)
class Setup:
    """What all measurements share: the model, its law, and which pictures are made, `batch` at a time."""

    model: Model
    sampling: Sampling
    asked: Sequence[Request]
    batch: int = 1

    @property
    def codes(self) -> int:
        """Codes of a picture."""
        return self.model.target.config.block_size

    def batches(self) -> list[Sequence[Request]]:
        """The pictures in batches, without a last one that is not full unless it is the only one."""
        whole = [self.asked[i : i + self.batch] for i in range(0, len(self.asked), self.batch)]
        return [asked for asked in whole if len(asked) == self.batch] or [self.asked]

    def decoder(self, method: Method) -> Decoder:
        """The method put together."""
        return Decoder(self.model, method, self.sampling)

    def now(self) -> float:
        """The clock, once the device has done what it was told."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # sync
        return time.perf_counter()


@dataclass
class StepClock:
    """Seconds of each step, of the target's pass and of drafting in it, as a generation goes on."""

    setup: Setup
    limit: int
    verify: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = 0.0

    def __call__(self, step: Step) -> None:
        """The callback: a step is from one call to the next."""
        now = self.setup.now()
        if self._last:
            self.step.append(now - self._last)
        if len(self.step) >= self.limit:
            raise _EnoughError
        self._last = self.setup.now()

    def of_tree(self, nodes: int, depth: int, inner: int) -> Laps:
        """Medians without the warm-up; a run of few steps counts them all.

        In turns that are one program a pass is not seen apart, and is nearly all of a step.
        """
        skipped = WARM_UP if len(self.step) > 2 * WARM_UP else 0
        passes, drafts = (self.verify or self.step)[-len(self.step) :], self.draft[-len(self.step) :]
        kept = [median(values[skipped:]) if values else 0.0 for values in (passes, drafts, self.step)]
        return Laps(nodes, depth, inner, *kept)


class TimedTarget:
    """A target that books the seconds of every pass on a clock; from outside, so that compiled passes are timed too."""

    def __init__(self, target: Any, clock: StepClock) -> None:
        self._target, self._clock = target, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Scores:
        """As the target's own."""
        begun = self._clock.setup.now()
        scores = self._target(*args, **kwargs)
        self._clock.verify.append(self._clock.setup.now() - begun)
        return scores


class TimedDrafter:
    """A drafter that books its seconds of each step on a clock."""

    def __init__(self, drafter: Any, clock: StepClock) -> None:
        self._drafter, self._clock, self._spent = drafter, clock, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self) -> DraftTree:
        """As the drafter's own."""
        begun = self._clock.setup.now()
        tree = self._drafter.propose()
        self._spent = self._clock.setup.now() - begun
        return tree

    def observe(self, step: Step) -> None:
        """As the drafter's own."""
        begun = self._clock.setup.now()
        self._drafter.observe(step)
        self._clock.draft.append(self._spent + self._clock.setup.now() - begun)


def time_steps(setup: Setup, method: Method, *, steps: int) -> StepClock:
    """Decodes until `steps` steps were timed, or one picture is done; ValueError for pictures of a single code."""
    if setup.codes < 2:
        raise ValueError("pictures of one code have nothing to tune: plain decoding makes them in one pass")
    decoder, clock = setup.decoder(method), StepClock(setup, steps)
    timed: dict[str, Any] = {"target": TimedTarget(decoder.parts.target, clock)}
    if decoder.parts.drafter is not None:
        timed["drafter"] = TimedDrafter(decoder.parts.drafter, clock)
    decoder.parts = dataclasses.replace(decoder.parts, **timed)
    asked = setup.batches()[0]
    try:
        decoder.decode(decoder.condition(asked), asked, clock)
    except _EnoughError:
        return clock
    return clock


def time_trees(setup: Setup, method: Method, trees: Sequence[StaticTree], *, steps: int, rounds: int) -> list[Laps]:
    """Medians over `rounds` of the laps with each tree, the trees in turn."""
    runs: list[list[Laps]] = [[] for _ in trees]
    for _ in range(rounds):
        for tree, done in zip(trees, runs, strict=True):
            clock = time_steps(setup, method.with_options(tree=tree.spelling), steps=steps)
            done.append(clock.of_tree(tree.max_nodes, tree.depth, tree.num_inner))
    return [middle(done) for done in runs]


def time_plain(setup: Setup, *, steps: int, rounds: int) -> Laps:
    """Laps of plain decoding, whose pass has one node."""
    return middle([time_steps(setup, METHODS["plain"], steps=steps).of_tree(1, 0, 0) for _ in range(rounds)])


def middle(runs: Sequence[Laps]) -> Laps:
    """Laps of one tree, their seconds medians over runs."""
    medians = {name: median(getattr(run, name) for run in runs) for name in ("verify", "draft", "step")}
    return dataclasses.replace(runs[0], **medians)


def trees_to_time(setup: Setup, max_nodes: int, max_depth: int) -> list[StaticTree]:
    """Trees of all sizes up to `max_nodes`, flat, middling and deep, no wider than there are codes."""
    widest = setup.model.target.config.vocab_size
    found: dict[StaticTree, None] = {}
    for nodes in sorted({size for size in SIZES if size < max_nodes} | {max_nodes}):
        for depth in (1, 3, max_depth):
            tree = named(f"chain_{depth}") if depth == nodes - 1 else grown(nodes - 1, min(depth, nodes - 1, 9))
            if tree.max_nodes == nodes and max(tree.shape().widths) <= widest:
                found[tree] = None
    return list(found)


@dataclass(frozen=True)
class Acceptance:
    """What a drafter's codes are worth to a verifier: rates by depth and rank, and the mean total variation a code."""

    rates: list[list[float]]
    tested: list[list[int]]
    total_variation: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them; depths and ranks that no step came to are left out."""
        seen = [sum(count > 0 for count in row) for row in self.tested]
        deep = sum(width > 0 for width in seen)
        return {
            "rates": [[round(rate, 4) for rate in row[:n]] for row, n in zip(self.rates[:deep], seen, strict=False)],
            "tested": [row[:n] for row, n in zip(self.tested[:deep], seen, strict=False)],
            "total_variation": round(self.total_variation, 6),
        }


def measure_acceptance(setup: Setup, method: Method, *, nodes: int, depth: int, batches: int) -> Acceptance:
    """Decodes some batches with a wide tree, grown anew for each by what was learned, and counts what is taken."""
    width = min(16, setup.model.target.config.vocab_size)
    tally, rates, moved, made = Tally(setup.codes, depth, width), [], 0.0, 0
    for asked in setup.batches()[:batches]:
        tree = probing_tree(rates, nodes=nodes, depth=depth, width=width)
        decoder = setup.decoder(method.with_options(tree=tree.spelling))
        generation = decoder.decode(decoder.condition(asked), asked, tally)
        tally.count()
        rates = tally.rates()
        moved, made = moved + float(generation.total_variation.sum()), made + generation.codes.numel()
    return Acceptance(rates, tally.tested.tolist(), moved / max(made, 1))


@dataclass(frozen=True)
class WindowFigures:
    """Codes per pass and seconds per code of a method without a tree, such as a Jacobi window of some length."""

    tau: float
    seconds: float
    total_variation: float


def measure_window(setup: Setup, method: Method, *, batches: int) -> WindowFigures:
    """Decodes some batches whole; seconds are those of a median step."""
    decoder = setup.decoder(method)
    passes = codes = 0
    moved, steps = 0.0, []
    for asked in setup.batches()[:batches]:
        clock = StepClock(setup, limit=setup.codes + 1)
        generation = decoder.decode(decoder.condition(asked), asked, clock)
        steps += clock.step[min(WARM_UP, len(clock.step) // 2) :]
        passes, codes = passes + int(generation.passes.sum()), codes + generation.codes.numel()
        moved += float(generation.total_variation.sum())
    tau = codes / max(passes, 1)
    return WindowFigures(tau, median(steps) / tau / setup.batch, moved / codes)


@dataclass(frozen=True)
class Run:
    """A whole run of a candidate: seconds per code, codes per pass, total variation a code."""

    seconds: float
    tau: float
    total_variation: float


def run_in_turn(setup: Setup, methods: Sequence[Method], *, batches: int) -> list[Run]:
    """Whole pictures by each method, interleaved, after a warm-up of each; seconds are medians over batches."""
    decoders = [setup.decoder(method) for method in methods]
    first = setup.batches()[0]
    for decoder in decoders:
        try:
            decoder.decode(decoder.condition(first), first, StepClock(setup, limit=2 * WARM_UP))
        except _EnoughError:
            continue
    runs: list[list[Run]] = [[] for _ in methods]
    for asked in setup.batches()[:batches]:
        for decoder, done in zip(decoders, runs, strict=True):
            done.append(_whole_run(setup, decoder, asked))
    return [Run(*(median(getattr(run, name) for run in done) for name in _NAMES)) for done in runs]


_NAMES = tuple(entry.name for entry in dataclasses.fields(Run))


def _whole_run(setup: Setup, decoder: Decoder, asked: Sequence[Request]) -> Run:
    condition = decoder.condition(asked)
    begun = setup.now()
    generation = decoder.decode(condition, asked)
    seconds, codes = setup.now() - begun, generation.codes.numel()
    tau = codes / max(int(generation.passes.sum()), 1)
    return Run(seconds / codes, tau, float(generation.total_variation.sum()) / codes)
