"""The state of one generation, and what a step does with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.decoding.draws import quick_draws
from lantern.decoding.finite import FiniteSoFar
from lantern.decoding.ledger import Ledger
from lantern.decoding.prefill import FirstScores, Start
from lantern.decoding.stopwatch import Stopwatch
from lantern.decoding.tree_mask import TreeMask
from lantern.decoding.turns import Turns
from lantern.sampling import Sampling
from lantern.types import (
    Condition,
    Drafter,
    DraftTree,
    Generation,
    Prefill,
    Scores,
    Step,
    Target,
    Verdict,
    Verifier,
)


def draft(drafter: Drafter, step: Step | None) -> DraftTree:
    """Lets a drafter see the last step, if there was one, and propose."""
    if step is not None:
        drafter.observe(step)
    return drafter.propose()


@dataclass(frozen=True)
class Settled:
    """What came of a tree: the verdict, the codes it adds, and how many of them lie within the picture."""

    verdict: Verdict
    fresh: Int[Tensor, "b m"]
    counts: Int[Tensor, " b"]


def settle(run: "Run", verifier: Verifier, tree: DraftTree, scores: Scores) -> Settled:
    """Turns logits into laws, lets the verifier walk, and keeps the path in codes and cache.

    Row i of the laws is that of the code that follows node i. What lies past the end of the picture is dropped.
    """
    tree = tree.walkable
    places = (run.known[:, None] + tree.shape.depths).clamp(max=run.count - 1)
    logits = scores.logits.unflatten(0, (len(run.known), run.cache.rows))[:, :, : tree.shape.num_nodes]
    verdict = judge(run, verifier, tree, logits, places)
    walked = torch.nn.functional.pad(verdict.path, (1, 0))
    run.cache.commit(walked, run.known - 1)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, verdict.path), (0, 1))
    fresh = drafted.scatter(1, verdict.length[:, None], verdict.next_token[:, None])
    # Past the end of the picture there is room, which is cut off in the end.
    run.codes.scatter_(1, run.known[:, None] + run.ahead[: fresh.shape[1]], fresh)
    counts = torch.minimum(verdict.length + 1, run.count - run.known)
    # The drafts of a window take the laws that they were drawn from along to the next turn.
    is_carried = verdict.leftovers is not None and verdict.leftovers.log_q is not None
    unused = counts[:, None] <= (0 if is_carried else run.ahead[: walked.shape[1]])
    run.finite.look(logits, nodes=None if is_carried else walked, unused=unused)
    return Settled(verdict, fresh, counts)


def judge(run: "Run", verifier: Any, tree: DraftTree, logits: Tensor, places: Int[Tensor, "b n"]) -> Verdict:
    """Lets a verifier walk, by the laws or, where they are enough for it, by the target's own draws."""
    if reads_draws(verifier):
        return verifier.match(tree, run.draw(verifier, logits, places), places)
    return verifier.walk(tree, run.law.log_probs(logits, places), places, run.noise)


def reads_draws(verifier: Any) -> bool:
    """Whether a verifier needs no law."""
    return getattr(verifier, "reads_draws", False)


@dataclass(frozen=True)
class Programs:
    """The two parts of a step beside the target's pass: as they are, or compiled (`decoding.compiled`)."""

    draft: Callable[[Drafter, Step | None], DraftTree] = draft
    settle: Callable[["Run", Verifier, DraftTree, Scores], Settled] = settle


class Run:
    """The state of one generation: `known` codes of each image are decided, the last of them not yet cached."""

    def __init__(
        self, target: Target, begun: Start, law: Sampling, nodes: int, depth: int, taps: tuple[int, ...] = ()
    ) -> None:
        # Targets need not know of taps unless a drafter has some.
        self._told: dict[str, Any] = {"taps": taps} if taps else {}
        self.target, self.begun, self.law = target, begun, law
        self.cache, self.noise = begun.cache, begun.noise
        self.count, self.depth = target.config.block_size, depth
        images, device = begun.mask.shape[0], begun.mask.device
        self.codes = torch.zeros(images, self.count + depth + 1, dtype=torch.long, device=device)
        self.known = torch.ones(images, dtype=torch.long, device=device)
        self.ledger = Ledger(self.count)
        self.finite = FiniteSoFar(images, device)
        self._left, self._age = self.count - 1, 0  # codes that the slowest image lacked, turns ago
        self._readback = Readback(device)
        self._mask = TreeMask(self.cache, begun.prefix, nodes)
        self.ahead = torch.arange(depth + 1, device=device)
        self._slots = torch.arange(nodes, device=device) + self.cache.first_stage_slot
        self._index = 0

    def is_done(self) -> bool:
        """Whether every image is finished; asks the device only when that is possible. Finished images idle."""
        if self._left > self._age * (self.depth + 1):
            return False
        if self._age > 0:
            known = self._readback.read(self.known)
            if known is None:
                return False
            self._left, self._age = self.count - known, 0
        return self._left <= 0

    def draw_first(self, verifier: Verifier) -> Step:
        """Draws code 0 from what the prompt says."""
        place = torch.zeros_like(self.known)[:, None]
        if reads_draws(verifier):
            self.codes[:, :1] = self.draw(verifier, self.begun.logits, place)
        else:
            self.codes[:, :1] = verifier.draw(self.law.log_probs(self.begun.logits, place), place, self.noise)
        self.finite.look(self.begun.logits)
        features = self.begun.features[:, :, -1:].flatten(0, 1)
        scores = FirstScores(self.begun.logits.flatten(0, 1), features)
        return Step(0, place[:, 0], torch.ones_like(self.known), self.codes[:, :1].clone(), scores)

    def draw(
        self, verifier: Verifier, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """The target's own draws, for a verifier that reads no more: in one call where there is one, else by itself."""
        quick = quick_draws(self.target, self.law, self.noise)
        if quick is not None:
            return quick(logits, places)[..., 0]
        return verifier.draw(self.law.scores(logits, places), places, self.noise)

    def prefill(self, condition: Condition) -> Prefill:
        """What the prompt left behind, for a drafter."""
        begun = self.begun
        return Prefill(begun.features, begun.mask, self.codes[:, 0], begun.fused, condition)

    def score(self, tree: DraftTree) -> Scores:
        """Runs the target over the tree; all rows of an image see the same codes."""
        rows, config, shape = self.cache.rows, self.target.config, tree.scored or tree.shape
        mask = self._mask.update(self.known - 1, shape.ancestors)
        places = (self.known[:, None] - 1 + shape.depths).clamp(max=self.count - 1)
        positions = (places + config.cls_token_num).repeat_interleave(rows, 0)
        inputs = self.target.tok_embeddings(tree.tokens).repeat_interleave(rows, 0)
        slots = self._slots[: shape.num_nodes].expand(len(positions), -1)
        return self.target(inputs, positions, mask, cache=self.cache, slots=slots, **self._told)

    def advance(self, tree: DraftTree, scores: Scores, settled: Settled) -> Step:
        """Counts the new codes as known; on the device alone."""
        start = self.known
        self.known = start + settled.counts
        return Step(0, start, settled.counts, settled.fresh, scores, tree, settled.verdict)

    def book(self, step: Step) -> Step:
        """Enters a step in the ledger and gives it its number; on the host alone."""
        assert step.tree is not None and step.verdict is not None
        self._index += 1
        # Leftovers are large, and only the drafter's business.
        self.ledger.enter(step.tree.shape, replace(step.verdict, leftovers=None), step.start)
        self._age += 1
        return replace(step, index=self._index)

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """The finished grids with the account of how they came about."""
        totals = self.ledger.totals(len(self.known), self.depth, self.known.device)
        return Generation(
            codes=self.codes[:, : self.count],
            passes=totals.passes,
            accepted=totals.accepted,
            reached=totals.reached,
            relaxed=totals.relaxed,
            total_variation=totals.total_variation,
            steps=steps,
            seconds=seconds,
            total_variation_max=totals.total_variation_max,
            latent_distance=totals.latent_distance,
            is_finite=self.finite.flags,
        )


class Readback:
    """Tells the host how far the slowest image is; a GPU is one turn ahead and never waits for the host.

    On a GPU the number travels on its own: what `read` gives is as of the last call, None at the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._posted: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, known: Int[Tensor, " b"]) -> int | None:
        """The least of the numbers of known codes."""
        if not self._is_cuda:
            return int(known.min())  # sync
        last, place = self._posted, torch.empty((), dtype=known.dtype, pin_memory=True)
        place.copy_(known.min(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = place, event
        if last is None:
            return None
        last[1].synchronize()  # sync with the turn before the last
        return int(last[0])


class DraftedTurns(Turns):
    """Steps of a run with a drafter and a verifier."""

    def __init__(self, run: "Run", drafter: Drafter, verifier: Verifier, programs: Programs, watch: Stopwatch) -> None:
        self.run, self.drafter, self.verifier = run, drafter, verifier
        self.programs, self.watch = programs, watch
        self.step: Step | None = None

    @property
    def owners(self) -> tuple[object, ...]:
        """Itself, the run and the drafter, with what that is made of."""
        return (self, self.run, self.drafter, *getattr(self.drafter, "members", ()))

    def book(self, step: Step) -> Step:
        """Enters a step in the run's books."""
        return self.run.book(step)

    def work(self) -> Step:
        """What a step does on the device."""
        tree = self.programs.draft(self.drafter, self.step)
        self.watch.lap("propose")
        scores = self.run.score(tree)
        self.watch.lap("score")
        settled = self.programs.settle(self.run, self.verifier, tree, scores)
        self.watch.lap("walk")
        self.step = self.run.advance(tree, scores, settled)
        return self.step
