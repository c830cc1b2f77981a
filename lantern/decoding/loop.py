"""The decoding loop: draft a tree, score it with the target, verify it, keep the accepted path.

    state.start(...)                     # the prompt gives token 0
    while not state.is_done():
        state.take()                     # draft -> score -> verify -> commit, in one round

`State` holds a generation under way. Who runs the pass between `draft` and `finish` is a driver: `rounds.py` runs it by
torch, for one generation or several, and engines replay whole rounds or run them in C++.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import HeldSampling, Noise, Sampling, largest, rounded_log_softmax
from lantern.core.types import (
    Buffers,
    Callback,
    Condition,
    Drafter,
    DraftTree,
    Generation,
    ImageMemory,
    Prompt,
    Rows,
    Sampler,
    Scores,
    Step,
    Target,
    TreeShape,
    Verdict,
    Verifier,
    rows_at,
)
from lantern.core.weights import original, outside_modes
from lantern.decoding.cache import (
    FULL_CACHE,
    CacheKind,
    PromptCache,
    StaticCache,
    TreeMask,
    by_line,
    prefill,
    read_tokens,
)
from lantern.decoding.statistics import Readback, StepSums, Stopwatch, totals, write_tokens

PATIENCE = 0.1  # seconds of rounds per call; between calls the interpreter handles signals
NO_SCORES: Any = None  # of steps that are kept
LOW = -1e20  # logit beside a forced token: guidance subtracts logits, and the sum of all of them must be finite


@dataclass(frozen=True)
class Inputs:
    """The arguments of the target's pass in a step, and the token number of each node."""

    inputs: Float[Tensor, "rows n c"]
    positions: Int[Tensor, "rows n"]
    mask: Float[Tensor, "rows n s"]
    cache: StaticCache
    slots: Int[Tensor, "rows n"]
    places: Int[Tensor, "b n"]
    taps: tuple[int, ...] = ()

    def scores(self, target: Target) -> Scores:
        """Run the pass."""
        return target(self.inputs, self.positions, self.mask, cache=self.cache, slots=self.slots, taps=self.taps)


class State:
    """A generation under way: `tokens` of each image, of which `known` are decided and the last is not yet cached.

    Every tensor that a round replaces is in `held` or written in place. `may_look`: the host may look at values between
    the operations of a round, so that a verifier reads only the nodes that it visits.
    ValueError for a verifier that cannot verify this drafter's trees.
    """

    cache: StaticCache
    mask: TreeMask
    noise: Noise
    sampler: Sampler | None
    watch: Stopwatch
    tree: DraftTree
    step: Step
    end: int  # number of tokens up to the last one that is not given
    kind: Hashable = None  # equal for generations whose images can be those of one batch
    batch_of: "Callable[[int], State] | None" = None  # begins a batch of so many images of this generation's prompt

    def __init__(self, target: Target, sampling: Sampling, drafter: Drafter, verifier: Verifier) -> None:
        check_modes(drafter, verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.sampling, self.count, self.may_look = sampling, target.config.block_size, True
        self.held = Buffers()
        self.forced: ForcedTokens | None = None
        self.index = self._age = self._left = 0
        self.has_begun = False

    def start(self, prompt: Prompt) -> Step:
        """Take over the prompt, which fills `cache`; return the step that gives token 0 and the given tokens after."""
        images, device, nodes = len(prompt.mask), prompt.mask.device, self.drafter.max_nodes
        self.mask = self.cache.tree_mask(self.cache.prefix_scores, nodes, hides=self.target.follows_masks)
        self.held.ahead = torch.arange(max(nodes, self.drafter.depth + 1), device=device)
        self.held.slots = self.held.ahead[:nodes] + self.cache.first_stage_slot
        self.statistics = StepSums(images, self.drafter.depth, self.end, device)
        self.readback, self._left, self._age = Readback(device), self.end - 1, 0
        # `tokens` has room past the end of the image.
        self.held.tokens = torch.zeros(images, self.count + nodes, dtype=torch.long, device=device)
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)
        self.drafter.begin(prompt, self.noise)
        first = self._first(prompt)
        self.drafter.observe(first)
        for step in self._given():
            self.drafter.observe(step)
            first = replace(first, counts=first.counts + step.counts, tokens=torch.cat([first.tokens, step.tokens], 1))
        return first

    def draft(self) -> Inputs:
        """Propose a tree; return the pass that scores it. All guidance rows of an image see the same tokens."""
        tree, rows = self.propose(), self.cache.rows
        self.tree = tree if self.forced is None else self.forced.tree(tree, self.known)
        self.watch.lap("propose")
        self.root = self.known - 1  # the number of its token
        places = self.places_of(self.tree, self.root)
        embedded = by_line(self.target.tok_embeddings(self.tree.tokens), rows)
        positions = by_line(places + self.target.config.cls_token_num, rows)
        mask = self.mask.update(self.root, self.tree.shape.ancestors)
        slots = self.held.slots[: self.tree.shape.num_nodes].expand(len(positions), -1)
        return Inputs(embedded, positions, mask, self.cache, slots, places, self.drafter.taps)

    def propose(self) -> DraftTree:
        """Return the drafter's next tree."""
        return self.drafter.propose()

    def finish(self, found: Scores) -> Step:
        """Verify the tree by the scores of its pass, keep the accepted path, and let the drafter observe it.

        Tokens past the end of the image are dropped.
        """
        self.watch.lap("score")
        tree, places = self.tree, self.places_of(self.tree, self.known)
        scores = self.by_image(found, places)
        verdict = self.verify(tree, scores.logits, places)
        self.cache.commit(verdict.walked, self.root)
        start, ahead = self.known.clone(), self.held.ahead[: verdict.walked.shape[1]]
        drafted = torch.nn.functional.pad(tree.tokens.gather(1, verdict.path), (0, 1))
        fresh = drafted.scatter(1, verdict.length[:, None], verdict.next_token[:, None])
        self.tokens.scatter_(1, start[:, None] + ahead, fresh)
        counts = torch.minimum(verdict.length + 1, self.count - start)
        self.known.add_(counts)
        self._check(scores.logits, verdict)
        self.watch.lap("walk")
        step = Step(0, start, counts, fresh, scores, tree, verdict)
        self.drafter.observe(step)
        return step

    def round(self) -> Step:
        """Draft, score, verify and commit. Only tensors change."""
        return self.finish(self.draft().scores(self.target))

    def record(self, step: Step, images: slice = slice(None)) -> None:
        """Count a step, on the host; this generation's are these images of it."""
        self.index, self._age = self.index + 1, self._age + 1
        self.step = replace(step, index=self.index)
        if step.tree is not None and step.verdict is not None:
            self.statistics.enter(step.tree.shape, step.verdict, step.start, images)

    def take(self) -> None:
        """Take a step."""
        self.record(self.round())

    def advance(self, known: int, steps: int) -> None:
        """Count steps after which the slowest image has `known` tokens."""
        self.index, self._left, self._age = self.index + steps, self.end - known, 0

    def is_done(self) -> bool:
        """Return whether every image is finished; asks the device only after as many steps as that needs."""
        if self._left > self._age * (self.drafter.depth + 1):
            return False
        if self._age > 0:
            known = self.readback.read(self.known)
            if known is None:
                return False
            self._left, self._age = self.end - known, 0
        return self._left <= 0

    def rest(self) -> Step:
        """Return the given tokens behind the last free one, which need no pass, as a step."""
        assert self.forced is not None
        ahead = torch.arange(self.count - int(self.known.min()), device=self.known.device)  # sync
        tokens = self.forced.at(self.known[:, None] + ahead)
        return Step(self.index + 1, self.known.clone(), self.count - self.known, tokens, NO_SCORES)

    def result(self) -> Generation:
        """Return the finished grids with the statistics of the generation."""
        sums = self.statistics
        sums.add()
        if self.forced is not None:
            self.tokens[:, self.end : self.count] = self.forced.tokens[:, self.end :]
        return Generation(
            tokens=self.tokens[:, : self.count].clone(),
            steps=sums.steps,
            accepted=sums.accepted,
            reached=sums.reached,
            relaxed=sums.relaxed.float(),
            total_variation=sums.variation.float().clamp(max=self.count),  # 1 a token, where a bound is more
            total_variation_max=sums.largest.clamp(max=1.0),
            is_finite=self.held.total.isfinite(),
            latent_distance=sums.distance.float() if sums.has_distance else None,
            excess=sums.excess.float() if sums.is_bounded else None,
            seconds=self.watch.seconds,
        )

    @property
    def tokens(self) -> Int[Tensor, "b room"]:
        """Tokens of each image; what is past `known` and past the end of the image is undefined."""
        return self.held.tokens

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of decided tokens of each image."""
        return self.held.known

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """What a round leaves to the next one."""
        return self.held, self.cache, self.noise, *self.drafter.memory

    @property
    def stage(self) -> int:
        """Slots of the cache for the nodes of a pass."""
        return self.drafter.max_nodes

    @property
    def group(self) -> tuple[object, ...]:
        """What generations have in common whose passes can be joined."""
        return (type(self), id(original(self.target)), self.cache.form, self.drafter.taps)

    def places_of(self, tree: DraftTree, first: Int[Tensor, " b"]) -> Int[Tensor, "b n"]:
        """Return the numbers of the tokens of a tree's nodes, or of what follows them; `first` is that of the root."""
        return (first[:, None] + tree.shape.depths).clamp(max=self.count - 1)

    def by_image(self, found: Scores, places: Int[Tensor, "b n"]) -> Scores:
        """Return scores with a leading image axis; tokens that are given have all mass."""
        images = len(self.known)
        features = found.features.unflatten(0, (images, -1))
        tapped = None if found.tapped is None else found.tapped.unflatten(0, (images, -1))
        logits = found.logits.unflatten(0, (images, -1))
        logits = logits if self.forced is None else self.forced.logits(logits, places)
        return Scores(logits, features, tapped)

    def verify(self, tree: DraftTree, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]) -> Verdict:
        """Return the verifier's verdict on a tree by the logits of its pass."""
        may_stop = self.may_look and not self.drafter.reads_samples
        rows = LogitRows(self.sampling, logits, places, self.noise, self.sampler, may_stop)
        verdict = self.target.walk(self.verifier, tree, rows)
        return self.verifier.verify(tree, rows, self.noise) if verdict is None else verdict

    def _first(self, prompt: Prompt) -> Step:
        """Return step 0: token 0 follows the prompt, as it would follow a tree of one node."""
        node = torch.zeros_like(self.known)[:, None]
        verdict = self.verify(DraftTree(node, TreeShape.chain(0, node.device), self.drafter.mode), prompt.logits, node)
        self.tokens[:, :1] = verdict.next_token[:, None]
        self.known.fill_(1)
        self.held.total = totals(prompt.logits).float()
        tapped = None if prompt.tapped is None else prompt.tapped[:, :, -1:]
        scores = Scores(prompt.logits, prompt.features[:, :, -1:], tapped)
        return Step(0, node[:, 0], torch.ones_like(self.known), self.tokens[:, :1].clone(), scores)

    def _given(self) -> Iterator[Step]:
        """Read the tokens that all images keep from the start, but token 0, in few passes; yield them as steps."""
        if self.forced is None or (kept := self.forced.common_prefix) == 1:
            return
        tokens = self.forced.tokens[:, :kept]
        read, passes = read_tokens(self.target, self.cache, tokens[:, :-1], taps=self.drafter.taps)
        self.statistics.steps += passes
        size = self.drafter.depth + 1
        for first in range(1, kept, size):
            these = slice(first, min(first + size, kept))
            tapped = None if read.tapped is None else read.tapped[:, :, first - 1 : these.stop - 1]
            features = read.features[:, :, first - 1 : these.stop - 1]
            scores = Scores(features[..., :0], features, tapped)
            counts = torch.full_like(self.known, these.stop - first)
            self.tokens[:, these] = tokens[:, these]
            yield Step(0, self.known.clone(), counts, tokens[:, these], scores)
            self.known.add_(counts)
        self._left = self.end - kept

    def _check(self, logits: Float[Tensor, "b r n v"], verdict: Verdict) -> None:
        """Add the logits that a token was sampled from to their sum, which keeps a NaN or an infinite number.

        The drafts of a window keep the distributions that they were sampled from for the next step.
        """
        read = logits if verdict.log_q is not None else logits_at(logits, verdict.walked)
        self.held.total.add_(totals(read))


@outside_modes
@torch.no_grad()
def begin(
    state: State,
    condition: Condition,
    *,
    keys: Sequence[tuple[int, int]],
    prompts: PromptCache | None = None,
    forced: Int[Tensor, "b n"] | None = None,
    sampling: Sampling | None = None,
    is_timed: bool = False,
    kind: CacheKind = FULL_CACHE,
) -> State:
    """Begin a generation: read the prompt; return the state after token 0, which is its `step`.

    `keys` are the (seed, image number) of each image's noise. `forced` are tokens that are given, -1 where a token is
    sampled: no method changes them. Those that all images keep from the start are read in few passes and reported with
    token 0, those behind the last free one of all images need no pass; the others count as accepted drafts. A held
    sampling takes the values of `sampling`, which has its form; others keep theirs. `prompts` keeps prompts between
    calls. A state that has begun before keeps its cache if it fits and is of this `kind`.
    ValueError for another number of keys, and for forced tokens of another shape or number.
    """
    if len(keys) != condition.batch:
        raise ValueError(f"got {len(keys)} noise keys for {condition.batch} images, wanted one (seed, number) each")
    target, drafter, config = state.target, state.drafter, state.target.config
    device = target.tok_embeddings.weight.device
    state.watch, state.index = Stopwatch(device, is_timed), 0
    prompt, state.cache = prefill(
        target,
        condition.to(device),
        state.sampling.rows,
        stage=state.stage,
        whole=drafter.needs_whole_prefix,
        taps=drafter.taps,
        cache=state.cache if state.has_begun else None,
        prompts=prompts,
        kind=kind,
    )
    if isinstance(state.sampling, HeldSampling):
        assert sampling is None or sampling.form == state.sampling.form
        state.held.sampling = (sampling or state.sampling).values(len(keys), device)
        state.sampling.hold(state.held.sampling)
    sizes = {"positions": config.block_size, "vocab_size": config.vocab_size, "device": device}
    how = {"is_silent": state.sampling.is_greedy, "make_gumbel": target.make_gumbel}
    noise = Noise(keys, **sizes, **how)
    state.noise = state.noise.take_keys(noise) if state.has_begun else noise
    state.sampler = target.sampler(state.sampling, state.noise)
    state.forced, state.end = None, state.count
    if forced is not None:
        state.held.forced = forced.to(device)
        state.forced = ForcedTokens(state.held.forced)
        state.forced.check(images=len(keys), tokens=config.block_size, vocab_size=config.vocab_size)
        state.end = state.forced.end
        logits = state.forced.logits(prompt.logits, forced.new_zeros(len(keys), 1).to(device))
        prompt = replace(prompt, logits=logits)
    state.watch.lap("prefill")  # `start` of plain decoding counts its first sample as "draw"
    state.step = state.start(prompt)
    state.has_begun = True
    state.watch.lap("prefill")
    return state


@outside_modes
@torch.no_grad()
def run(
    state: State,
    rounds: Callable[[float], None] | None = None,
    *,
    callback: Callback | None = None,
    interval: float = 0.0,
) -> Generation:
    """Take the rounds of a generation that has begun, and return the finished grids.

    `rounds` takes one or more of them (`lantern.decoding.rounds`), by default those of torch. `callback` is called with
    every step, and ends the generation by returning True. With an `interval` in seconds it may be called with the last
    of the steps in that time only, without scores, tree and verdict.
    """
    patience = PATIENCE if callback is None else interval

    def is_ended() -> bool:
        """Report a step; return whether the callback ends the generation."""
        return callback is not None and callback(state.step) is True

    is_stopped = is_ended()
    while not is_stopped and not state.is_done():
        if rounds is None:
            state.take()
        else:
            rounds(patience)
        is_stopped = is_ended()
    if not is_stopped and state.end < state.count and bool((state.known < state.count).any()):
        state.step = state.rest()
        is_stopped = is_ended()
    made = state.result()
    if not is_stopped:
        return made
    known = state.step.start + state.step.counts
    is_missing = torch.arange(state.count, device=known.device) >= known[:, None]
    return replace(made, tokens=made.tokens.masked_fill(is_missing, 0), known=known)


def check_modes(drafter: Drafter, verifier: Verifier) -> None:
    """Raise ValueError if a verifier cannot verify the trees of a drafter; the message names the modes that it can."""
    if drafter.mode not in verifier.modes:
        legal = ", ".join(sorted(verifier.modes))
        raise ValueError(
            f'{type(verifier).__name__} cannot verify trees drafted in mode "{drafter.mode}": use one of {legal}'
        )


@dataclass(frozen=True)
class ForcedTokens:
    """Tokens of each image that are given, -1 where a token is sampled.

    At a forced token the target's distribution is that token alone, and so is the draft. Every verifier then accepts
    it, no relaxation moves mass there, and the tokens that follow are conditioned on it.
    """

    tokens: Int[Tensor, "b n"]

    def check(self, *, images: int, tokens: int, vocab_size: int) -> None:
        """Raise ValueError for another number of images or tokens, and for tokens that do not exist."""
        if list(self.tokens.shape) != [images, tokens]:
            raise ValueError(f"forced tokens have shape {list(self.tokens.shape)}, wanted {[images, tokens]}")
        lowest, highest = int(self.tokens.min()), int(self.tokens.max())
        if lowest < -1 or highest >= vocab_size:
            raise ValueError(f"forced tokens are from {lowest} to {highest}, wanted -1 (free) to {vocab_size - 1}")

    @property
    def common_prefix(self) -> int:
        """Number of tokens that all images keep from the start, at least 1. Waits for the device."""
        return max(int((self.tokens >= 0).long().cumprod(1).sum(1).min()), 1)  # sync

    @property
    def end(self) -> int:
        """Number of tokens up to the last free one of all images, at least 1. Waits for the device."""
        return max((self.tokens < 0).any(0).nonzero().flatten().tolist(), default=0) + 1  # sync

    def at(self, places: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Return the tokens of these numbers; past the end of the image, the last."""
        return self.tokens.gather(1, places.clamp(max=self.tokens.shape[1] - 1))

    def logits(self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b r n v"]:
        """Return logits for these token numbers, with all mass on forced tokens, the same in all guidance rows."""
        forced = self.at(places)[:, None, :, None]
        point = torch.full_like(logits, LOW).scatter(-1, forced.clamp(min=0).expand(*logits.shape[:3], 1), 0.0)
        return torch.where(forced < 0, logits, point)

    def tree(self, tree: DraftTree, known: Int[Tensor, " b"]) -> DraftTree:
        """Return a tree below token number `known - 1` that drafts forced tokens where there are any."""
        places = known[:, None] - 1 + tree.shape.depths
        forced = self.at(places)
        forced[:, 0] = -1  # the root is a committed token
        log_q = tree.log_q
        if log_q is not None:
            log_q = self.logits(log_q[:, None], places[:, : log_q.shape[1]] + 1)[:, 0]
        return replace(tree, tokens=torch.where(forced < 0, tree.tokens, forced), log_q=log_q)


@dataclass(frozen=True)
class LogitRows(Rows):
    """The rows of `logits` under a sampling. `sampler` is the target's for this sampling and noise, if it has one."""

    sampling: Sampling
    logits: Float[Tensor, "b r n v"]
    places: Int[Tensor, "b n"]
    noise: Noise
    sampler: Sampler | None = None
    may_stop: bool = False

    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image (None: all)."""
        if nodes is None:
            return self._every
        if not self.may_stop:
            return rows_at(self._every, nodes)
        logits, places = self._at(nodes)
        return self.sampling.log_probs(logits, places, may_look=True)

    def rounded_log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return `log_p` with bits that depend on the logits only."""
        logits, places = (self.logits, self.places) if nodes is None else self._at(nodes)
        return rounded_log_softmax(self.sampling.scores(logits, places, self.may_stop))

    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return what plain decoding samples after these nodes (None: all)."""
        logits, places = (self.logits, self.places) if nodes is None else self._at(nodes)
        if self.sampler is not None:
            return self.sampler(logits, places)[..., 0]
        return largest(self.sampling.scores(logits, places, self.may_stop) + self.noise.gumbel(places), self.may_stop)

    def sample_into(self, grid: Int[Tensor, "b t"], total: Float[Tensor, " b"]) -> Int[Tensor, "b n"]:
        """Return `sample` of all nodes, written to their places of the grids, with their sums, as by `write_tokens`."""
        if self.sampler is not None:
            return self.sampler(self.logits, self.places, grid=grid, total=total)[..., 0]
        tokens = self.sample()
        write_tokens(grid, total, self.logits, self.places, tokens)
        return tokens

    def untruncated(self) -> Rows:
        """Return the rows at temperature 1 without filters."""
        return replace(self, sampling=self.sampling.untruncated(), sampler=None)

    @cached_property
    def _every(self) -> Float[Tensor, "b n v"]:
        return self.sampling.log_probs(self.logits, self.places, self.may_stop)

    def _at(self, nodes: Int[Tensor, "b m"]) -> tuple[Float[Tensor, "b r m v"], Int[Tensor, "b m"]]:
        """Return the logits and places of these nodes of each image, of a single one without a copy."""
        is_one = self.may_stop and nodes.numel() == 1
        logits = self.logits.narrow(2, int(nodes), 1) if is_one else logits_at(self.logits, nodes)
        return logits, self.places.gather(1, nodes)


def logits_at(logits: Float[Tensor, "b r n v"], nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b r m v"]:
    """Return the logits of these nodes of each image."""
    if len(nodes) == 1:
        return logits.index_select(2, nodes[0])
    return logits[torch.arange(len(nodes), device=nodes.device)[:, None], :, nodes].transpose(1, 2)
