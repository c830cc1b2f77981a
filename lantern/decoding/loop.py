"""The decoding loop: draft a tree, score it with the target, verify it, keep the accepted path.

Rows of a pass become log-probabilities, or samples, when a walk reads them. Statistics, NaN flags and phase timers stay
on the device. The host reads them once, at the end.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import (
    Callback,
    Condition,
    Drafter,
    DraftTree,
    Generation,
    Kept,
    Prefill,
    Rows,
    Scores,
    Step,
    Target,
    TreeShape,
    Verdict,
    Verifier,
)
from lantern.decoding.cache import StaticCache, TreeMask
from lantern.decoding.forced import PassScores
from lantern.decoding.prompt import PromptCache, Start, read_codes, start
from lantern.decoding.rows import LogitRows, logits_at


@dataclass(frozen=True)
class Totals:
    """Sums over all steps of each image; the fields are those of `Generation`."""

    passes: Int[Tensor, " b"]
    accepted: Int[Tensor, "b d"]
    reached: Int[Tensor, "b d"]
    relaxed: Float[Tensor, " b"]
    total_variation: Float[Tensor, " b"]
    total_variation_max: Float[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None
    excess: Float[Tensor, " b"] | None


class Counters:
    """Keeps the verdicts of all steps, a few numbers each. Statistics are computed once, at the end.

    Codes past the end of the image are not counted. `passes` are those before the first step.
    """

    def __init__(self, codes: int) -> None:
        self._codes, self.passes = codes, 1
        self._entries: list[tuple[TreeShape, Verdict, Tensor]] = []

    def enter(self, shape: TreeShape, verdict: Verdict, start: Int[Tensor, " b"]) -> None:
        """Record a step whose first new code is number `start` of its image."""
        self._entries.append((shape, verdict, start))

    def totals(self, images: int, depth: int, device: torch.device) -> Totals:
        """Return the sums over all steps. The passes over the prompt and over kept codes are counted too."""
        zeros = torch.zeros(images, depth, dtype=torch.long, device=device)
        sums = torch.zeros(5, images, device=device)
        costs = [verdict.cost for _, verdict, _ in self._entries]
        is_measured = all(cost is not None and cost.latent_distance is not None for cost in costs)
        distance = sums[3] if is_measured else None
        excess = sums[4] if any(cost is not None and cost.bound is not None for cost in costs) else None
        totals = Totals(
            zeros.new_full((images,), self.passes), zeros, zeros.clone(), sums[0], sums[1], sums[2], distance, excess
        )
        shapes = {id(shape): shape for shape, _, _ in self._entries}
        for name, shape in shapes.items():
            self._add(totals, shape, [entry[1:] for entry in self._entries if id(entry[0]) == name])
        return totals

    def _add(self, totals: Totals, shape: TreeShape, entries: list[tuple[Verdict, Tensor]]) -> None:
        """Add all steps in which the tree had this shape."""
        path = torch.stack([verdict.path for verdict, _ in entries])
        length = torch.stack([verdict.length for verdict, _ in entries])[..., None]
        start = torch.stack([start for _, start in entries])[..., None]
        steps = torch.arange(path.shape[-1] + 1, device=path.device)
        is_inside = start + steps < self._codes
        is_committed = is_inside & (steps <= length)
        is_accepted = (is_inside & (steps < length))[..., :-1]
        visited = torch.nn.functional.pad(path, (1, 0))
        can_descend = shape.has_children.expand(*visited.shape[:2], -1).gather(-1, visited)
        totals.passes.add_(is_inside[..., 0].sum(0))
        totals.accepted[:, : path.shape[-1]].add_(is_accepted.sum(0))
        totals.reached[:, : path.shape[-1]].add_((is_committed & can_descend)[..., :-1].sum(0))
        costs = [verdict.cost for verdict, _ in entries if verdict.cost is not None]
        if not costs:
            return
        totals.relaxed.add_(torch.where(is_accepted, torch.stack([cost.relaxed for cost in costs]), 0.0).sum((0, 2)))
        spent = torch.where(is_committed, torch.stack([cost.total_variation for cost in costs]), 0.0)
        totals.total_variation.add_(spent.sum((0, 2)))
        torch.maximum(totals.total_variation_max, spent.amax((0, 2)), out=totals.total_variation_max)
        if totals.excess is not None and costs[0].bound is not None:
            totals.excess.add_((spent - costs[0].bound).clamp(min=0.0).sum((0, 2)))
        moved = [cost.latent_distance for cost in costs if cost.latent_distance is not None]
        if moved and totals.latent_distance is not None:
            totals.latent_distance.add_(torch.where(is_committed, torch.stack(moved), 0.0).sum((0, 2)))


class FiniteSoFar:
    """One flag per image: whether all logits that its codes were sampled from are finite, in both guidance rows.

    Each row of logits is summed, since NaN and infinity carry over to the sum. Logits whose sum overflows count as
    infinite. `flags` stays on the device and is updated in place, so that `look` can be compiled and captured.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self.flags: Bool[Tensor, " b"] = torch.ones(images, dtype=torch.bool, device=device)

    def look(
        self,
        logits: Float[Tensor, "b r n v"],
        *,
        nodes: Int[Tensor, "b m"] | None = None,
        unused: Bool[Tensor, "b k"] | None = None,
    ) -> None:
        """Check the logits after `nodes` (None: all n), except the `unused` ones, from which no code was sampled."""
        sums = (logits if nodes is None else logits_at(logits, nodes)).sum((1, 3))
        is_finite = sums - sums == 0
        if unused is not None:
            is_finite = is_finite | unused
        self.flags.logical_and_(is_finite.all(1))


def now(device: torch.device) -> float:
    """Return the time in seconds after all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync
    return time.perf_counter()


class Stopwatch:
    """Adds up the seconds between laps by phase. If it is off it does nothing, and the host does not wait."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self.seconds: dict[str, float] = {}
        self._last = now(device) if is_on else 0.0

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        if not self._is_on:
            return
        last, self._last = self._last, now(self._device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._last - last

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore laps within the context, for work that must not wait. The next lap includes its time."""
        was_on, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = was_on


def report(step: Step, callback: Callback | None, steps: list[Step] | None) -> None:
    """Pass a step to the callback, and append it to `steps` without its large parts: scores, samples, log q."""
    if callback is not None:
        callback(step)
    if steps is not None:
        verdict = None if step.verdict is None else replace(step.verdict, samples=None, log_q=None)
        steps.append(replace(step, scores=None, codes=step.codes.clone(), verdict=verdict))


class Stepper(ABC):
    """Takes the steps of a generation, one after the other; `watch` times their phases.

    The first `varying_steps` steps may have other sizes than the rest. `on_host` names attributes that the work on the
    device does not read.
    """

    target: Target
    watch: Stopwatch
    varying_steps: ClassVar[int] = 0
    on_host: ClassVar[tuple[str, ...]] = ("watch", "programs", "_index")

    @property
    @abstractmethod
    def state_holders(self) -> tuple[object, ...]:
        """The objects whose tensors a step may replace by others."""

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects that it shares with other generations and that hold tensors of their own."""
        return ()

    @abstractmethod
    def work(self) -> Step:
        """Run the part of a step on the device."""

    @abstractmethod
    def record_step(self, step: Step) -> Step:
        """Return the step with its number, and record it; on the host only."""

    def take_step(self) -> Step:
        """Take a step."""
        return self.record_step(self.work())


def draft(drafter: Drafter, step: Step | None) -> DraftTree:
    """Give a drafter the last step, if there was one, and return the tree that it proposes."""
    if step is not None:
        drafter.observe(step)
    return drafter.propose()


@dataclass(frozen=True)
class Inputs:
    """The arguments of the target's pass in a step, and the code number of each node."""

    inputs: Float[Tensor, "rows n c"]
    positions: Int[Tensor, "rows n"]
    mask: Float[Tensor, "rows n s"]
    cache: StaticCache
    slots: Int[Tensor, "rows n"]
    places: Int[Tensor, "b n"]
    taps: tuple[int, ...] = ()

    def scores(self, target: Target) -> Scores:
        """Run the pass. Targets need no argument `taps` unless a drafter has some."""
        reported: dict[str, Any] = {"taps": self.taps} if self.taps else {}
        return target(self.inputs, self.positions, self.mask, cache=self.cache, slots=self.slots, **reported)


@dataclass(frozen=True)
class Verified:
    """Result of a tree: the verdict, the codes it adds, and how many of them lie within the image."""

    verdict: Verdict
    fresh: Int[Tensor, "b m"]
    counts: Int[Tensor, " b"]


def verify(run: "Run", verifier: Verifier, tree: DraftTree, scores: Scores) -> Verified:
    """Verify a tree by its scores, and keep the accepted path in the codes and the cache.

    Row i of the scores is for the code that follows node i. Codes past the end of the image are dropped.
    """
    places = (run.known[:, None] + tree.shape.depths).clamp(max=run.count - 1)
    logits = scores.logits.unflatten(0, (len(run.known), run.cache.rows))
    verdict = verifier.verify(tree, run.rows(logits, places), run.noise)
    walked = torch.nn.functional.pad(verdict.path, (1, 0))
    run.cache.commit(walked, run.known - 1)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, verdict.path), (0, 1))
    fresh = drafted.scatter(1, verdict.length[:, None], verdict.next_token[:, None])
    # `codes` has room past the end of the picture, which `generation` cuts off.
    run.codes.scatter_(1, run.known[:, None] + run.ahead[: fresh.shape[1]], fresh)
    counts = torch.minimum(verdict.length + 1, run.count - run.known)
    # The drafts of a window keep the distributions that they were sampled from for the next step.
    is_carried = verdict.log_q is not None
    unused = counts[:, None] <= (0 if is_carried else run.ahead[: walked.shape[1]])
    run.finite.look(logits, nodes=None if is_carried else walked, unused=unused)
    return Verified(verdict, fresh, counts)


def unwrapped(stepper: Stepper) -> Stepper:
    """Return the stepper as it is."""
    return stepper


@dataclass(frozen=True)
class Programs:
    """How an engine runs the parts of a step other than the target's pass; by default directly.

    `wrap` may replace the stepper by one that replays its steps. With `may_look` the host may look at values between
    the operations of a step on a CPU, so that a verifier reads only the nodes that it visits.
    """

    draft: Callable[[Drafter, Step | None], DraftTree] = draft
    verify: Callable[["Run", Verifier, DraftTree, Scores], Verified] = verify
    wrap: Callable[[Stepper], Stepper] = unwrapped
    may_look: bool = True


@dataclass(frozen=True)
class Decoding:
    """How a batch of images is decoded and observed: the arguments that `generate` of every decoder takes.

    `keys` are the (seed, image number) of each image's noise. `callback` is called with every step; with `keep_steps`
    the result holds all steps; with `is_timed` it holds the seconds of each phase. `cache` is reused if it fits, and
    `prompts` keeps the state of prompts; `reproducible` is as for `cache.start`. `programs` are how an engine runs the
    parts of a step (`Engine.programs`). `forced` are codes that are given, -1 where a code is sampled: no method
    changes them. Those that all images keep from the start are read in few passes and reported with code 0, unless
    the drafter cannot (`Drafter.reads_kept`); the others count as drafted codes that were accepted.
    """

    sampling: Sampling
    keys: Sequence[tuple[int, int]]
    callback: Callback | None = None
    keep_steps: bool = False
    is_timed: bool = False
    cache: StaticCache | None = None
    prompts: PromptCache | None = None
    reproducible: bool = False
    programs: Programs = Programs()
    forced: Int[Tensor, "b n"] | None = None
    steps: list[Step] = field(default_factory=list, init=False)

    def start(self, target: Target, condition: Condition, *, stage: int, **more: Any) -> Start:
        """Run the pass over the prompt (`cache.start`)."""
        return start(
            target,
            condition.to(target.tok_embeddings.weight.device),
            sampling=self.sampling,
            keys=self.keys,
            stage=stage,
            cache=self.cache,
            prompts=self.prompts,
            reproducible=self.reproducible,
            forced=self.forced,
            **more,
        )

    def stopwatch(self, target: Target) -> Stopwatch:
        """Return a stopwatch, which is off unless the generation is timed."""
        return Stopwatch(target.tok_embeddings.weight.device, self.is_timed)

    def report(self, step: Step) -> None:
        """Report a step to the callback, and keep it if steps are kept."""
        report(step, self.callback, self.steps if self.keep_steps else None)


class Run:
    """State of a generation: `known` codes of each image are decided, of which the last is not yet cached.

    With `is_lazy` verifiers read only the nodes that they visit, if they can. `on_host` is as for `Stepper`.
    """

    on_host: ClassVar[tuple[str, ...]] = ("counters", "_left", "_age", "_readback", "_index")

    def __init__(
        self,
        target: Target,
        begun: Start,
        distribution: Sampling,
        nodes: int,
        depth: int,
        taps: tuple[int, ...] = (),
        *,
        is_lazy: bool = False,
    ) -> None:
        self.taps = taps
        self.target, self.begun, self.distribution = target, begun, distribution
        self.cache, self.noise, self.is_lazy = begun.cache, begun.noise, is_lazy
        self.count, self.depth = target.config.block_size, depth
        images, device = begun.mask.shape[0], begun.mask.device
        self.codes = torch.zeros(images, self.count + depth + 1, dtype=torch.long, device=device)
        self.known = torch.ones(images, dtype=torch.long, device=device)
        self.counters = Counters(self.count)
        self.finite = FiniteSoFar(images, device)
        self._left, self._age = self.count - 1, 0  # codes that the slowest image lacked `_age` steps ago
        self._readback = Readback(device)
        self._mask = TreeMask(self.cache, begun.prefix, nodes)
        self.ahead = torch.arange(depth + 1, device=device)
        self._slots = torch.arange(nodes, device=device) + self.cache.first_stage_slot
        self._index = 0

    def is_done(self) -> bool:
        """Return whether every image is finished. Reads from the device only if that is possible by now."""
        if self._left > self._age * (self.depth + 1):
            return False
        if self._age > 0:
            known = self._readback.read(self.known)
            if known is None:
                return False
            self._left, self._age = self.count - known, 0
        return self._left <= 0

    def sample_first(self, verifier: Verifier) -> Step:
        """Sample code 0 from the logits of the prompt."""
        place = torch.zeros_like(self.known)[:, None]
        root = TreeShape(place[:1, 0], place[:1, 0], place[:1, 0], torch.ones_like(place[:1], dtype=torch.bool), ())
        tree = DraftTree(place, root, "point")
        self.codes[:, 0] = verifier.verify(tree, self.rows(self.begun.logits, place), self.noise).next_token
        self.finite.look(self.begun.logits)
        features = self.begun.features[:, :, -1:].flatten(0, 1)
        scores = PassScores(self.begun.logits.flatten(0, 1), features)
        return Step(0, place[:, 0], torch.ones_like(self.known), self.codes[:, :1].clone(), scores)

    def rows(self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]) -> Rows:
        """Return the rows of a pass for a verifier."""
        sampler = self.target.sampler(self.distribution, self.noise)
        return LogitRows(self.distribution, logits, places, self.noise, sampler, self.is_lazy)

    def prefill(self, condition: Condition) -> Prefill:
        """Return the results of the pass over the prompt, for a drafter."""
        begun = self.begun
        return Prefill(begun.features, begun.mask, self.codes[:, 0], begun.fused, condition)

    def read_kept(self) -> Kept | None:
        """Fill the cache with the codes that all images keep from the start but the last; None if there is but one."""
        if self.begun.forced is None or (kept := self.begun.forced.kept) == 1:
            return None
        codes = self.begun.forced.codes[:, :kept]
        read = read_codes(self.target, self.cache, self.begun.prefix, codes[:, :-1], taps=self.taps)
        self.codes[:, :kept] = codes
        self.known, self._left = self.known + (kept - 1), self.count - kept
        self.counters.passes += read.passes
        return Kept(codes[:, 1:], read.features, read.fused)

    def score(self, tree: DraftTree) -> Scores:
        """Run the target over the tree."""
        inputs = self.inputs(tree)
        return self.with_forced(inputs.scores(self.target), inputs)

    def inputs(self, tree: DraftTree) -> Inputs:
        """Return the pass over the tree; all rows of an image see the same codes."""
        rows, config, shape = self.cache.rows, self.target.config, tree.shape
        mask = self._mask.update(self.known - 1, shape.ancestors)
        places = (self.known[:, None] - 1 + shape.depths).clamp(max=self.count - 1)
        positions = (places + config.cls_token_num).repeat_interleave(rows, 0)
        inputs = self.target.tok_embeddings(tree.tokens).repeat_interleave(rows, 0)
        slots = self._slots[: shape.num_nodes].expand(len(positions), -1)
        return Inputs(inputs, positions, mask, self.cache, slots, places, self.taps)

    def with_forced(self, scores: Scores, inputs: Inputs) -> Scores:
        """Return the scores of a pass with those of forced codes in place of the target's."""
        return scores if self.begun.forced is None else self.begun.forced.scores(scores, inputs.places + 1)

    def advance(self, tree: DraftTree, scores: Scores, verified: Verified) -> Step:
        """Count the new codes as known; on the device only."""
        start = self.known
        self.known = start + verified.counts
        return Step(0, start, verified.counts, verified.fresh, scores, tree, verified.verdict)

    def record_step(self, step: Step) -> Step:
        """Return the step with its number, and record it in the counters; on the host only."""
        assert step.tree is not None and step.verdict is not None
        self._index += 1
        # Samples and their log q are large, and only the drafter reads them.
        self.counters.enter(step.tree.shape, replace(step.verdict, samples=None, log_q=None), step.start)
        self._age += 1
        return replace(step, index=self._index)

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """Return the finished grids with the statistics of the run."""
        totals = self.counters.totals(len(self.known), self.depth, self.known.device)
        return Generation(
            codes=self.codes[:, : self.count].clone(),  # a graph keeps its memory for the next generation
            passes=totals.passes,
            accepted=totals.accepted,
            reached=totals.reached,
            relaxed=totals.relaxed,
            total_variation=totals.total_variation,
            steps=steps,
            seconds=seconds,
            total_variation_max=totals.total_variation_max,
            latent_distance=totals.latent_distance,
            excess=totals.excess,
            is_finite=self.finite.flags.clone(),
        )


class Readback:
    """Reads on the host how many codes the slowest image has. A GPU runs one step ahead and never waits for the host.

    On a GPU the number is copied asynchronously: `read` returns that of the previous call, None at the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._posted: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, known: Int[Tensor, " b"]) -> int | None:
        """Return the smallest number of known codes of any image."""
        if not self._is_cuda:
            return int(known.min())  # sync
        last, place = self._posted, torch.empty((), dtype=known.dtype, pin_memory=True)
        place.copy_(known.min(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = place, event
        if last is None:
            return None
        last[1].synchronize()  # sync with the step before the last
        return int(last[0])


class DraftedStepper(Stepper):
    """Steps of a run with a drafter and a verifier."""

    varying_steps = 3  # none precedes the first, and the second observes less

    def __init__(self, run: "Run", drafter: Drafter, verifier: Verifier, programs: Programs, watch: Stopwatch) -> None:
        self.run, self.drafter, self.verifier = run, drafter, verifier
        self.target, self.programs, self.watch = run.target, programs, watch
        self.step: Step | None = None

    @property
    def state_holders(self) -> tuple[object, ...]:
        """Itself, the run, and the drafter with its members."""
        return (self, self.run, self.drafter, *self.drafter.members)

    @property
    def parts(self) -> tuple[object, ...]:
        """The drafter and the verifier."""
        return (self.drafter, self.verifier)

    def record_step(self, step: Step) -> Step:
        """Record a step in the run."""
        return self.run.record_step(step)

    def work(self) -> Step:
        """Draft, score, verify and commit."""
        tree, inputs = self.prepare()
        scores = inputs.scores(self.target)
        self.watch.lap("score")
        return self.finish(tree, inputs, scores)

    def prepare(self) -> tuple[DraftTree, Inputs]:
        """Draft; return the tree and the pass that scores it."""
        tree = self.programs.draft(self.drafter, self.step)
        if self.run.begun.forced is not None:
            tree = self.run.begun.forced.tree(tree, self.run.known)
        self.watch.lap("propose")
        return tree, self.run.inputs(tree)

    def finish(self, tree: DraftTree, inputs: Inputs, scores: Scores) -> Step:
        """Verify and commit."""
        scores = self.run.with_forced(scores, inputs)
        verified = self.programs.verify(self.run, self.verifier, tree, scores)
        self.watch.lap("walk")
        self.step = self.run.advance(tree, scores, verified)
        return self.step


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    drafter: Drafter,
    verifier: Verifier,
    **options: Any,
) -> Generation:
    """Decode with a drafter and a verifier. Each image advances by its own number of codes, and idles when it is done.

    `options` are the fields of `Decoding`. The host waits for the device only when the slowest image could be done.
    ValueError for a verifier that cannot verify this drafter's trees.
    """
    how = Decoding(**options)
    # 1) the prompt gives code 0
    own, first = begin(target, condition, drafter=drafter, verifier=verifier, how=how)
    how.report(first)
    own.watch.lap("prefill")
    stepper, run = how.programs.wrap(own), own.run
    while not run.is_done():
        # 2) observe the last step and propose a tree, score it, walk it and commit the path
        how.report(stepper.take_step())
        own.watch.lap("commit")
    return run.generation(how.steps, own.watch.seconds)


@torch.no_grad()
def begin(
    target: Target, condition: Condition, *, drafter: Drafter, verifier: Verifier, how: Decoding
) -> tuple[DraftedStepper, Step]:
    """Begin a generation: return its stepper, and the step that gives code 0 and the kept codes behind it."""
    check_modes(drafter, verifier)
    watch, programs = how.stopwatch(target), how.programs
    condition = condition.to(target.tok_embeddings.weight.device)
    whole = drafter.needs_whole_prefix
    begun = how.start(target, condition, stage=drafter.max_nodes, needs_whole_prefix=whole, taps=drafter.taps)
    # On a GPU the host would wait for the device at every look.
    is_lazy = programs.may_look and condition.device.type == "cpu" and not drafter.reads_leftovers
    run = Run(target, begun, how.sampling, drafter.max_nodes, drafter.depth, drafter.taps, is_lazy=is_lazy)
    first = run.sample_first(verifier)
    drafter.begin(run.prefill(condition), begun.noise)
    if drafter.reads_kept and (kept := run.read_kept()) is not None:
        drafter.read_kept(kept)
        codes = torch.cat([first.codes, kept.codes], 1)
        first = replace(first, counts=first.counts * codes.shape[1], codes=codes)
    return DraftedStepper(run, drafter, verifier, programs, watch), first


def check_modes(drafter: Drafter, verifier: Verifier) -> None:
    """Raise ValueError if a verifier cannot verify the trees of a drafter; the message names the modes that it can."""
    if drafter.mode not in verifier.modes:
        legal = ", ".join(sorted(verifier.modes))
        raise ValueError(
            f'{type(verifier).__name__} cannot verify trees drafted in mode "{drafter.mode}": use one of {legal}'
        )
