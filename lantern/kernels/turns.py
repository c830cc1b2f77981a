"""Plain decoding and Jacobi windows under fixed noise as one C++ program a turn (`turns.cpp`): no host work between.

The codes, and the account of how they came about, are those of `decoding.plain` and `decoding.loop`. In windows with
the bounded relaxation laws are the same up to rounding, so that a code may seldom be another.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lantern.decoding.prefill import FirstScores, Start, start
from lantern.decoding.stopwatch import Stopwatch
from lantern.decoding.telling import tell
from lantern.drafters.jacobi import JacobiDrafter, random_codes
from lantern.kernels.build import library
from lantern.kernels.packed import PassTold
from lantern.kernels.relaxing import Relaxing
from lantern.models.llamagen.transformer import Scores
from lantern.relaxations.bounded import Bounded
from lantern.sampling import Sampling
from lantern.trees.static import chain
from lantern.types import Callback, Condition, Drafter, DraftTree, Generation, Step, Target, Verdict, Verifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.relaxed import RelaxedVerifier

PATIENCE = 0.1  # seconds of turns at a time, after which the interpreter may be interrupted


class TurnsTold(ctypes.Structure):
    """`Turns` of turns.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("images", "nodes", "codes", "prefix", "conditioning", "top_k", "interval", "is_random", "is_half"),
            )
        ),
        *((name, ctypes.c_float) for name in ("guidance", "temperature")),
        *((name, ctypes.c_void_p) for name in ("embeddings", "noise", "random", "known", "window", "grid")),
        *((name, ctypes.c_void_p) for name in ("begun", "counts", "drawn", "passes", "accepted", "reached", "finite")),
        *((name, ctypes.c_void_p) for name in ("relaxing", "laws", "moved", "spent", "travelled", "owed", "price")),
        ("seconds", ctypes.c_double),
    ]


def fits(target: Target, sampling: Sampling, drafter: Drafter | None, verifier: Verifier | None) -> bool:
    """Whether turns are written for this: plain decoding or windows without a drafter, by Gumbel match, no top-p.

    A window may be relaxed within a bound, if it is to draw at all and not to take the most likely codes.
    """
    if not getattr(target, "is_fused", False) or sampling.top_p < 1:
        return False
    if drafter is None:
        return True
    if type(drafter) is not JacobiDrafter or drafter.continuation is not None:
        return False
    if drafter.keeps_laws:
        return type(verifier) is RelaxedVerifier and is_moved(verifier) and not sampling.is_greedy
    return type(verifier) is GumbelVerifier


def is_moved(verifier: RelaxedVerifier) -> bool:
    """Whether Gumbel match walks by a law that the bounded relaxation may move."""
    by = verifier.relaxation
    return type(verifier.inner) is GumbelVerifier and type(by) is Bounded and by.k > 0 and by.delta > 0 and by.cap > 1


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    drafter: JacobiDrafter | None = None,
    relaxation: Bounded | None = None,
    callback: Callback | None = None,
    keep_steps: bool = False,
    is_timed: bool = False,
    **how: Any,
) -> Generation:
    """As `loop.generate` and `plain.generate`, for what `fits`; `how` is cache and prompts, as for `prefill.start`."""
    watch, steps = Stopwatch(condition.device, is_timed), list[Step]()
    kept = steps if keep_steps else None
    # 1) the prompt gives code 0
    stage = 0 if drafter is None else drafter.max_nodes
    prompt = start(target, condition, sampling=sampling, keys=keys, stage=stage, **how)
    turns = FusedTurns(target, prompt, drafter, relaxation)
    tell(turns.draw_first(sampling), callback, kept)
    watch.lap("prefill")
    is_watched, is_done = callback is not None or keep_steps, target.config.block_size == 1
    while not is_done:
        # 2) turns, one by one where somebody looks
        is_done = turns.advance(0.0 if is_watched else PATIENCE)
        if is_watched:
            tell(turns.step(), callback, kept)
    watch.lap("walk")
    return turns.generation(steps, watch.seconds)


class FusedTurns:
    """The state of a generation, in memory that `lantern_turns` writes to; tensors are as in `turns.cpp`."""

    def __init__(self, target: Any, prompt: Start, drafter: JacobiDrafter | None, by: Bounded | None = None) -> None:
        images, self.count = len(prompt.mask), target.config.block_size
        self.target, self.prompt, self.drafter = target, prompt, drafter
        self.nodes, self._index = 1 if drafter is None else drafter.max_nodes, 0
        self.known, self.start, self.counts, self.passes = torch.ones(4, images, dtype=torch.long).unbind()
        self.grid = torch.zeros(images, self.count, dtype=torch.long)
        self.window, self.drawn = torch.zeros(2, images, self.nodes, dtype=torch.long).unbind()
        self.accepted, self.reached = torch.zeros(2, images, self.nodes - 1, dtype=torch.long).unbind()
        self.finite = torch.isfinite(prompt.logits.sum((1, 2, 3)))
        self._scored = self.window
        self._noise, self._random = prompt.noise.gumbel_table(), None
        if drafter is not None and drafter.init == "random":
            where = torch.arange(self.count).expand(images, -1)
            self._random = random_codes(prompt.noise, where, target.config.vocab_size)
        self._shape = None if drafter is None else chain(drafter.depth).shape("cpu")
        self.relaxing = None if by is None else Relaxing(by, images, self.nodes, target.config.vocab_size)
        self._drafted: Tensor | None = None  # the laws of the drafts that were scored last, where somebody looks

    def draw_first(self, sampling: Sampling) -> Step:
        """Draws code 0 from what the prompt says, and fills the window behind it."""
        prompt, place = self.prompt, torch.zeros_like(self.known)[:, None]
        first = (sampling.scores(prompt.logits, place) + prompt.noise.gumbel(place)).argmax(-1)
        self.grid[:, :1] = self.window[:] = first
        if self._random is not None:
            self.window[:, 1:] = self._random[:, torch.arange(1, self.nodes).clamp(max=self.count - 1)]
        if self.relaxing is not None:
            self.relaxing.begin(self.window[:, 1:], is_random=self._random is not None)
        self._lay_out(sampling)
        features = prompt.features[:, :, -1:].flatten(0, 1)
        scores = FirstScores(prompt.logits.flatten(0, 1), features)
        return Step(0, place[:, 0], torch.ones_like(self.known), first, scores)

    def advance(self, patience: float) -> bool:
        """Takes turns for so many seconds, one at least; whether all codes are known."""
        self._index += 1
        self._scored = self.window if patience else self.window.clone()
        if self.relaxing is not None and not patience:
            self._drafted = self.relaxing.log_laws()
        told = (self.target.fused_pass.model, self._pass, self._turns)
        return library().lantern_turns(*map(ctypes.byref, told), ctypes.c_double(patience)) >= self.count

    def step(self) -> Step:
        """The last turn; its scores are good until the next."""
        scores = Scores(self.logits, self.features.to(self.target.tok_embeddings.weight.dtype))
        codes = self.drawn.clone()
        told = (self._index, self.start.clone(), self.counts.clone(), codes, scores)
        if self._shape is None:
            return Step(*told)
        length = (self._scored[:, 1:] == codes[:, :-1]).long().cumprod(1).sum(1)
        nodes = torch.arange(1, self.nodes)
        path = torch.where(nodes <= length[:, None], nodes, 0)
        verdict = Verdict(path, length, codes.gather(1, length[:, None])[:, 0])
        if self.relaxing is None:
            return Step(*told, DraftTree(self._scored, self._shape, "gumbel"), verdict)
        return Step(*told, DraftTree(self._scored, self._shape, "jacobi", self._drafted), self.relaxing.priced(verdict))

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """The finished grids."""
        price = torch.zeros(len(self.known), 4) if self.relaxing is None else self.relaxing.price.float()
        relaxed, spent, travelled, most = price.unbind(1)
        if seconds:
            seconds["score"] = self._turns.seconds
            seconds["walk"] -= self._turns.seconds
        return Generation(
            codes=self.grid,
            passes=self.passes,
            accepted=self.accepted,
            reached=self.reached,
            relaxed=relaxed,
            total_variation=spent,
            steps=steps,
            seconds=seconds,
            total_variation_max=None if self.drafter is None else most,
            latent_distance=travelled if self.relaxing is not None and self.relaxing.tells_distance else None,
            is_finite=self.finite,
        )

    def _lay_out(self, sampling: Sampling) -> None:
        """Makes room for what a pass reads and gives, and says where all is."""
        cache, config, nodes = self.prompt.cache, self.target.config, self.nodes
        rows, first = cache.images * cache.rows, cache.first_stage_slot
        self.inputs, self.features = torch.empty(2, rows, nodes, config.dim).unbind()
        self.logits = torch.empty(rows, nodes, config.vocab_size)
        self._positions, self._places = torch.empty(rows, nodes, dtype=torch.long), torch.arange(nodes) + first
        self._mask = torch.full((rows, nodes, cache.slots), -torch.inf)
        self._mask[..., : cache.prefix] = self.prompt.prefix.repeat_interleave(cache.rows, 0)[:, None]
        if nodes > 1:
            self._mask[..., first:] = torch.full((nodes, nodes), -torch.inf).triu(1)
        taken = (self.inputs, self._positions, self._places, self._mask)
        self._pass = PassTold(
            *(rows, nodes, cache.slots, torch.get_num_threads(), 0),
            *(tensor.data_ptr() for tensor in taken),
            *(self._mask.stride(0), self._mask.stride(1), cache.buffer.data_ptr(), None, None),
            *(self.features.data_ptr(), self.logits.data_ptr()),
        )
        state = (self.known, self.window, self.grid, self.start, self.counts, self.drawn)
        account = (self.passes, self.accepted, self.reached, self.finite)
        embeddings = self.target.tok_embeddings.weight
        self._turns = TurnsTold(
            *(cache.images, nodes, self.count, cache.prefix, config.cls_token_num),
            *(min(sampling.top_k, config.vocab_size), min(sampling.guidance_interval, self.count)),
            *(self._random is not None, embeddings.dtype == torch.bfloat16),
            *(float(sampling.guidance), float(sampling.temperature)),
            embeddings.data_ptr(),
            *(None if tensor is None else tensor.data_ptr() for tensor in (self._noise, self._random)),
            *(tensor.data_ptr() for tensor in (*state, *account)),
            *(self.relaxing.places if self.relaxing is not None else (None,) * 7),
            0.0,
        )
