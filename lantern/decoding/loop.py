"""THE loop: a drafter proposes a tree, the target scores it, a verifier walks it, the cache keeps the path."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.decoding.ledger import Ledger
from lantern.decoding.prefill import FirstScores, PromptCache, Start, start
from lantern.decoding.stopwatch import Stopwatch
from lantern.decoding.tree_mask import TreeMask
from lantern.sampling import Sampling
from lantern.types import (
    Callback,
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


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    drafter: Drafter,
    verifier: Verifier,
    callback: Callback | None = None,
    keep_steps: bool = False,
    is_timed: bool = False,
    cache: StaticCache | None = None,
    prompts: PromptCache | None = None,
    queries: int = 0,
    programs: "Programs | None" = None,
) -> Generation:
    """Decodes with a drafter and a verifier; images advance each at its own pace and idle when they are done.

    Noise comes from `keys`, a (seed, image number) each. ValueError for a verifier that cannot judge this drafter's
    trees. The host waits for the device only when the slowest image could be done.
    """
    check_modes(drafter, verifier)
    condition = condition.to(target.tok_embeddings.weight.device)
    watch = Stopwatch(condition.device, is_timed)
    # 1) the prompt gives code 0
    begun = start(
        target,
        condition,
        sampling=sampling,
        keys=keys,
        stage=drafter.max_nodes,
        needs_whole_prefix=drafter.needs_whole_prefix,
        cache=cache,
        prompts=prompts,
        queries=queries,
    )
    law = sampling.soft() if verifier.reads_soft_law else sampling
    run = Run(target, begun, law, drafter.max_nodes, drafter.depth)
    first = run.draw_first(verifier)
    steps: list[Step] = []
    _tell(first, callback, steps if keep_steps else None)
    drafter.begin(Prefill(begun.features, begun.mask, run.codes[:, 0]), begun.noise)
    watch.lap("prefill")
    programs = programs or Programs()
    step = None
    while not run.is_done():
        # 2) observe what the last step gave and propose, score, walk and commit
        tree = programs.draft(drafter, step)
        watch.lap("propose")
        scores = run.score(tree)
        watch.lap("score")
        settled = programs.settle(run, verifier, tree, scores)
        watch.lap("walk")
        step = run.enter(tree, scores, settled)
        _tell(step, callback, steps if keep_steps else None)
        watch.lap("commit")
    return run.generation(steps, watch.seconds)


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
    places = (run.known[:, None] + tree.shape.depths).clamp(max=run.count - 1)
    logits = scores.logits.unflatten(0, (len(run.known), run.cache.rows))
    verdict = verifier.walk(tree, run.law.log_probs(logits, places), places, run.noise)
    run.cache.commit(torch.nn.functional.pad(verdict.path, (1, 0)), run.known - 1)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, verdict.path), (0, 1))
    fresh = drafted.scatter(1, verdict.length[:, None], verdict.next_token[:, None])
    # Past the end of the picture there is room, which is cut off in the end.
    run.codes.scatter_(1, run.known[:, None] + run.ahead[: fresh.shape[1]], fresh)
    return Settled(verdict, fresh, torch.minimum(verdict.length + 1, run.count - run.known))


@dataclass(frozen=True)
class Programs:
    """The two parts of a step beside the target's pass: as they are, or compiled (`decoding.compiled`)."""

    draft: Callable[[Drafter, Step | None], DraftTree] = draft
    settle: Callable[["Run", Verifier, DraftTree, Scores], Settled] = settle


def check_modes(drafter: Drafter, verifier: Verifier) -> None:
    """Refuses a verifier that cannot judge trees drawn in this way; ValueError names the modes that it can."""
    if drafter.mode not in verifier.modes:
        legal = ", ".join(sorted(verifier.modes))
        raise ValueError(
            f'{type(verifier).__name__} cannot verify trees drafted in mode "{drafter.mode}": use one of {legal}'
        )
    if getattr(verifier, "reads_log_q", False) and not getattr(drafter, "records_log_q", True):
        raise ValueError(
            f"{type(verifier).__name__} moves the law toward log q, which this {type(drafter).__name__} does not "
            "record: make it with records_log_q=True, or use a drafter of mode sampled"
        )


@dataclass
class Host:
    """What the host knows of the progress: no more than that the slowest image lacks `left` codes, `age` steps ago."""

    left: int
    age: int = 0


class Run:
    """The state of one generation: `known` codes of each image are decided, the last of them not yet cached."""

    def __init__(self, target: Target, begun: Start, law: Sampling, nodes: int, depth: int) -> None:
        self.target, self.begun, self.law = target, begun, law
        self.cache, self.noise = begun.cache, begun.noise
        self.count, self.depth = target.config.block_size, depth
        images, device = begun.mask.shape[0], begun.mask.device
        self.codes = torch.zeros(images, self.count + depth + 1, dtype=torch.long, device=device)
        self.known = torch.ones(images, dtype=torch.long, device=device)
        self.ledger = Ledger(self.count)
        self.host = Host(left=self.count - 1)
        self._mask = TreeMask(self.cache, begun.prefix, nodes)
        self.ahead = torch.arange(depth + 1, device=device)
        self._slots = torch.arange(nodes, device=device) + self.cache.first_stage_slot
        self._index = 0

    def is_done(self) -> bool:
        """Whether every image is finished; asks the device only when that is possible."""
        if self.host.left > self.host.age * (self.depth + 1):
            return False
        if self.host.age > 0:
            self.host = Host(left=self.count - int(self.known.min()))  # sync
        return self.host.left <= 0

    def draw_first(self, verifier: Verifier) -> Step:
        """Draws code 0 from what the prompt says."""
        place = torch.zeros_like(self.known)[:, None]
        log_p = self.law.log_probs(self.begun.logits, place)
        self.codes[:, :1] = verifier.draw(log_p, place, self.noise)
        features = self.begun.features[:, :, -1:].flatten(0, 1)
        scores = FirstScores(self.begun.logits.flatten(0, 1), features)
        return Step(0, place[:, 0], torch.ones_like(self.known), self.codes[:, :1].clone(), scores)

    def score(self, tree: DraftTree) -> Scores:
        """Runs the target over the tree; all rows of an image see the same codes."""
        rows, config = self.cache.rows, self.target.config
        mask = self._mask.update(self.known - 1, tree.shape.ancestors)
        places = (self.known[:, None] - 1 + tree.shape.depths).clamp(max=self.count - 1)
        positions = (places + config.cls_token_num).repeat_interleave(rows, 0)
        inputs = self.target.tok_embeddings(tree.tokens).repeat_interleave(rows, 0)
        slots = self._slots[: tree.shape.num_nodes].expand(len(positions), -1)
        return self.target(inputs, positions, mask, cache=self.cache, slots=slots)

    def enter(self, tree: DraftTree, scores: Scores, settled: Settled) -> Step:
        """Books a step and moves on."""
        self._index += 1
        step = Step(self._index, self.known, settled.counts, settled.fresh, scores, tree, settled.verdict)
        # Leftovers are large, and only the drafter's business.
        self.ledger.enter(tree.shape, replace(settled.verdict, leftovers=None), self.known)
        self.known = self.known + settled.counts
        self.host.age += 1
        return step

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
        )


def _tell(step: Step, callback: Callback | None, steps: list[Step] | None) -> None:
    if callback is not None:
        callback(step)
    if steps is not None:
        verdict = None if step.verdict is None else replace(step.verdict, leftovers=None)
        steps.append(replace(step, scores=None, verdict=verdict))
