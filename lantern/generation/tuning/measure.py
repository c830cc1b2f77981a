"""Measurements of real generations: seconds of steps, acceptance, and whole runs."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lantern.core.prepared import original
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree, Scores, Step
from lantern.decoding.statistics import now
from lantern.drafters.trees.static import StaticTree, grown, named
from lantern.generation.generator import Generator
from lantern.generation.requests import Request
from lantern.generation.tuning.acceptance import Tally, probing_tree
from lantern.generation.tuning.costs import Laps
from lantern.methods import METHODS, Method
from lantern.models.folder import Model

WARM_UP = 3  # steps of each run that are not counted
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class _EnoughError(Exception):
    """Ends a generation once enough steps were timed."""


@dataclass(frozen=True)
class Setup:
    """What all measurements share: the model, its sampling, and the images to make, `batch` at a time."""

    model: Model
    sampling: Sampling
    requested: Sequence[Request]
    batch: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.model.target.config.block_size

    def batches(self) -> list[Sequence[Request]]:
        """Return the requests in full batches, or all of them as one batch if no batch is full."""
        whole = [self.requested[i : i + self.batch] for i in range(0, len(self.requested), self.batch)]
        return [requested for requested in whole if len(requested) == self.batch] or [self.requested]

    def generator(self, method: Method) -> Generator:
        """Return a generator with this method."""
        return Generator(self.model, method, self.sampling)

    def now(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        return now(self.model.device)


@dataclass
class StepClock:
    """Callback that times each step; `verify` and `draft` are the target's passes and the drafter's share of steps."""

    setup: Setup
    limit: int
    verify: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = 0.0

    def __call__(self, step: Step) -> None:
        """End one step and begin the next."""
        moment = self.setup.now()
        if self._last:
            self.step.append(moment - self._last)
        if len(self.step) >= self.limit:
            raise _EnoughError
        self._last = self.setup.now()

    def of_tree(self, nodes: int, depth: int, inner: int) -> Laps:
        """Return medians without the warm-up steps; a run of few steps counts them all.

        A fused step does not show its pass separately, so the whole step counts as the pass.
        """
        skipped = WARM_UP if len(self.step) > 2 * WARM_UP else 0
        steps, drafts = (self.verify or self.step)[-len(self.step) :], self.draft[-len(self.step) :]
        kept = [median(values[skipped:]) if values else 0.0 for values in (steps, drafts, self.step)]
        return Laps(nodes, depth, inner, *kept)


class TimedTarget:
    """A target that adds the seconds of every pass to a clock; it is a wrapper, so compiled passes are timed too."""

    def __init__(self, target: Any, clock: StepClock) -> None:
        self._target, self._clock = target, clock

    @property
    def training(self) -> bool:
        """Whether the module that the target was prepared from is in training mode."""
        return original(self._target).training

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Scores:
        """Run and time the target's pass."""
        start = self._clock.setup.now()
        scores = self._target(*args, **kwargs)
        self._clock.verify.append(self._clock.setup.now() - start)
        return scores


class TimedDrafter:
    """A drafter that adds its seconds of each step to a clock."""

    def __init__(self, drafter: Any, clock: StepClock) -> None:
        self._drafter, self._clock, self._spent = drafter, clock, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self) -> DraftTree:
        """Run and time the drafter's `propose`."""
        start = self._clock.setup.now()
        tree = self._drafter.propose()
        self._spent = self._clock.setup.now() - start
        return tree

    def observe(self, step: Step) -> None:
        """Run and time the drafter's `observe`."""
        start = self._clock.setup.now()
        self._drafter.observe(step)
        self._clock.draft.append(self._spent + self._clock.setup.now() - start)


def time_steps(setup: Setup, method: Method, *, steps: int) -> StepClock:
    """Decode until `steps` steps are timed or the batch is done; ValueError for images of a single token."""
    if setup.tokens < 2:
        raise ValueError("images of one token cannot be tuned: plain decoding makes them in one pass")
    generator, clock = setup.generator(method), StepClock(setup, steps)
    timed: dict[str, Any] = {"target": TimedTarget(generator.parts.target, clock)}
    if generator.parts.drafter is not None:
        timed["drafter"] = TimedDrafter(generator.parts.drafter, clock)
    generator.parts = dataclasses.replace(generator.parts, **timed)
    requested = setup.batches()[0]
    with suppress(_EnoughError):
        generator.decode(generator.condition(requested), requested, clock)
    return clock


def time_trees(setup: Setup, method: Method, trees: Sequence[StaticTree], *, steps: int, rounds: int) -> list[Laps]:
    """Return the laps with each tree, as medians over `rounds`; the trees alternate within a round."""
    runs: list[list[Laps]] = [[] for _ in trees]
    for _ in range(rounds):
        for tree, done in zip(trees, runs, strict=True):
            clock = time_steps(setup, method.with_options(tree=tree.spelling), steps=steps)
            done.append(clock.of_tree(tree.max_nodes, tree.depth, tree.num_inner))
    return [middle(done) for done in runs]


def time_plain(setup: Setup, *, steps: int, rounds: int) -> Laps:
    """Return the laps of plain decoding, whose pass has one node."""
    return middle([time_steps(setup, METHODS["plain"], steps=steps).of_tree(1, 0, 0) for _ in range(rounds)])


def middle(runs: Sequence[Laps]) -> Laps:
    """Return the laps of one tree as medians over runs."""
    medians = {name: median(getattr(run, name) for run in runs) for name in ("verify", "draft", "step")}
    return dataclasses.replace(runs[0], **medians)


def trees_to_time(setup: Setup, max_nodes: int, max_depth: int) -> list[StaticTree]:
    """Return trees of all sizes up to `max_nodes` in three depths, no wider than the codebook."""
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
    """Acceptance of a drafter's tokens: rates by depth and rank, and the mean total variation per token."""

    rates: list[list[float]]
    tested: list[list[int]]
    total_variation: float

    def as_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values, without depths and ranks that no step tested."""
        seen = [sum(count > 0 for count in row) for row in self.tested]
        deep = sum(width > 0 for width in seen)
        return {
            "rates": [[round(rate, 4) for rate in row[:n]] for row, n in zip(self.rates[:deep], seen, strict=False)],
            "tested": [row[:n] for row, n in zip(self.tested[:deep], seen, strict=False)],
            "total_variation": round(self.total_variation, 6),
        }


def measure_acceptance(setup: Setup, method: Method, *, nodes: int, depth: int, batches: int) -> Acceptance:
    """Decode some batches with wide trees and count acceptance; each batch's tree uses the counts before it."""
    width = min(16, setup.model.target.config.vocab_size)
    tally, rates, moved, made = Tally(setup.tokens, depth, width), [], 0.0, 0
    for requested in setup.batches()[:batches]:
        tree = probing_tree(rates, nodes=nodes, depth=depth, width=width)
        generator = setup.generator(method.with_options(tree=tree.spelling))
        generation = generator.decode(generator.condition(requested), requested, tally)
        tally.count()
        rates = tally.rates()
        moved, made = moved + float(generation.total_variation.sum()), made + generation.tokens.numel()
    return Acceptance(rates, tally.tested.tolist(), moved / max(made, 1))


@dataclass(frozen=True)
class Run:
    """Whole images by a method: seconds per token, tokens per step, total variation per token."""

    seconds: float
    tau: float
    total_variation: float


def measure_window(setup: Setup, method: Method, *, batches: int) -> Run:
    """Decode some batches to the end; `seconds` are those of a median step."""
    generator = setup.generator(method)
    steps = tokens = 0
    moved, seconds = 0.0, []
    for requested in setup.batches()[:batches]:
        clock = StepClock(setup, limit=setup.tokens + 1)
        generation = generator.decode(generator.condition(requested), requested, clock)
        seconds += clock.step[min(WARM_UP, len(clock.step) // 2) :]
        steps, tokens = steps + int(generation.steps.sum()), tokens + generation.tokens.numel()
        moved += float(generation.total_variation.sum())
    tau = tokens / max(steps, 1)
    return Run(median(seconds) / tau / setup.batch, tau, moved / tokens)


def run_interleaved(setup: Setup, methods: Sequence[Method], *, batches: int) -> list[Run]:
    """Make whole images by each method, interleaved, after a warm-up of each; return medians over batches."""
    generators = [setup.generator(method) for method in methods]
    first = setup.batches()[0]
    for generator in generators:
        with suppress(_EnoughError):
            generator.decode(generator.condition(first), first, StepClock(setup, limit=2 * WARM_UP))
    runs: list[list[Run]] = [[] for _ in methods]
    for requested in setup.batches()[:batches]:
        for generator, done in zip(generators, runs, strict=True):
            done.append(_whole_run(setup, generator, requested))
    return [Run(*map(median, zip(*map(dataclasses.astuple, done), strict=True))) for done in runs]


def _whole_run(setup: Setup, generator: Generator, requested: Sequence[Request]) -> Run:
    condition = generator.condition(requested)
    start = setup.now()
    generation = generator.decode(condition, requested)
    seconds, tokens = setup.now() - start, generation.tokens.numel()
    tau = tokens / max(int(generation.steps.sum()), 1)
    return Run(seconds / tokens, tau, float(generation.total_variation.sum()) / tokens)
