"""Jacobi windows: no drafter, the target's own last draws stand in for what it will say next."""

import math
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.methods import Kit, Method
from lantern.noise import Purpose
from lantern.trees.static import chain
from lantern.types import DraftMode, DraftTree, Leftovers, NoiseSource, Prefill, Step, Target

CONTINUED = 3  # codes that a drafter guesses behind a window; as many places and one more seldom come free in a step
INITS = ("random", "repeat-left", "drafter")


class Continuation(Protocol):
    """Guesses the codes behind a window, a few at a time."""

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether it reads all of the target's conditioning slots, padding included."""
        ...

    def begin(self, prefill: Prefill, noise: NoiseSource) -> Leftovers:
        """Forgets the last generation, reads the prompt of the next, and goes on behind its first code."""
        ...

    def extend(
        self, features: Float[Tensor, "b r n c"], tokens: Int[Tensor, "b n"], counts: Int[Tensor, " b"]
    ) -> Leftovers:
        """Goes on behind n codes, each given with the feature that predicts it; the first `counts` are committed."""
        ...


class JacobiDrafter:
    """Drafts a chain of `window` nodes: the last committed code and drafts of those that follow it.

    Every pass of the target draws all codes of the window anew; those that are not committed are the next window's
    (arXiv:2410.01699, arXiv:2510.24211), with the code that the last node was found to be followed by:

        drafted    a b c d       counts 2, leftovers a x y z w: the code that follows the root, a, b, c, d
        drafted    y z w .       a x are committed, x is the root; "." is new

    New places are filled as `init` says: "random", uniform over all codes; "repeat-left", the code before; "drafter",
    as many as `continuation` gives, the last of them again behind. `keeps_laws` records from which law each code was
    drawn, as coupling needs it; without, the drafts are for Gumbel match alone. A window is cut to the size of the
    picture; nodes that stand past the picture's end idle. ValueError for less than two nodes and for an unknown init.
    """

    def __init__(
        self,
        target: Target,
        *,
        window: int = 16,
        init: str = "random",
        keeps_laws: bool = True,
        continuation: Continuation | None = None,
    ) -> None:
        if window < 2:
            raise ValueError(f"the window is {window}, wanted at least 2: the last code and one draft")
        if init not in INITS:
            raise ValueError(f'init is "{init}", wanted one of {", ".join(INITS)}')
        if (init == "drafter") != (continuation is not None):
            raise ValueError(f'init is "{init}": "drafter" needs something that continues a window, others take none')
        self.init, self.keeps_laws, self.continuation = init, keeps_laws, continuation
        self.count, self.vocab_size = target.config.block_size, target.config.vocab_size
        self.max_nodes = max(min(window, self.count), 2)
        self.mode: DraftMode = "jacobi" if keeps_laws else "gumbel"

    @property
    def depth(self) -> int:
        """Drafted codes."""
        return self.max_nodes - 1

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether its continuation does."""
        return self.continuation is not None and self.continuation.needs_whole_prefix

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Fills the whole window with initial codes."""
        first, device = prefill.first[:, None], prefill.first.device
        images = len(first)
        self._shape = chain(self.depth).shape(device)
        self._images = torch.arange(images, device=device)[:, None]
        self._steps = torch.arange(self.max_nodes, device=device)
        self._known = torch.ones(images, dtype=torch.long, device=device)
        where = torch.arange(self.count, device=device).expand(images, -1)
        self._random = random_codes(noise, where, self.vocab_size)
        law = torch.zeros(images, 1, self.vocab_size, device=device) if self.keeps_laws else None
        ahead = None if self.continuation is None else self.continuation.begin(prefill, noise)
        self._shift(Leftovers(first, law), torch.ones_like(self._known), ahead)

    def propose(self) -> DraftTree:
        """The window as it stands."""
        return self._tree

    def observe(self, step: Step) -> None:
        """Shifts the window by what was committed and fills its end; ValueError if the verifier left nothing behind."""
        if step.verdict is None or step.verdict.leftovers is None:
            raise ValueError("the verifier leaves no codes behind for a window: use Gumbel match or coupling")
        left, ahead = step.verdict.leftovers, None
        if self.continuation is not None:
            assert step.scores is not None
            features = step.scores.features.unflatten(0, (len(step.counts), -1))
            ahead = self.continuation.extend(features, left.tokens, step.counts)
        self._known = self._known + step.counts
        self._shift(left, step.counts, ahead)

    def _shift(self, left: Leftovers, counts: Int[Tensor, " b"], ahead: Leftovers | None) -> None:
        """Moves what is left to the front; row i of the laws belongs to code i of the window, the last to none."""
        drawn = left.tokens.shape[1]
        index = counts[:, None] + self._steps
        is_new, source = index >= drawn, index.clamp(max=drawn - 1)
        codes = left.tokens.gather(1, source)
        if self.init == "random":
            places = (self._known[:, None] + self._steps).clamp(max=self.count - 1)
            codes = torch.where(is_new, self._random.gather(1, places), codes)
        # Guesses for places that are not free yet, or past the window, go to the row of the leaf.
        slots = None
        if ahead is not None:
            codes = torch.where(is_new, ahead.tokens[:, -1:], codes)
            steps = torch.arange(ahead.tokens.shape[1], device=codes.device)
            slots = ((drawn - counts)[:, None] + steps).clamp(max=self.depth)
            codes = codes.scatter(1, slots, ahead.tokens)
        log_q = None
        if left.log_q is not None:
            log_q = self._initial_laws(left.log_q[self._images, source], codes, is_new)
            if ahead is not None and slots is not None:
                assert ahead.log_q is not None
                log_q[self._images, slots] = ahead.log_q
        root = left.tokens.gather(1, (counts - 1).clamp(min=0)[:, None])
        self._tree = DraftTree(torch.cat([root, codes[:, :-1]], 1), self._shape, self.mode, log_q)

    def _initial_laws(
        self, log_q: Float[Tensor, "b n v"], codes: Int[Tensor, "b n"], is_new: Bool[Tensor, "b n"]
    ) -> Float[Tensor, "b n v"]:
        """Writes in place, for new codes, the law that they were drawn from: uniform, or the code itself."""
        if self.init == "random":
            return log_q.masked_fill_(is_new[..., None], -math.log(self.vocab_size))
        log_q.masked_fill_(is_new[..., None], -torch.inf)
        own = log_q.gather(-1, codes[..., None])
        return log_q.scatter_(-1, codes[..., None], own.masked_fill(is_new[..., None], 0.0))


def random_codes(noise: NoiseSource, where: Int[Tensor, "b n"], vocab_size: int) -> Int[Tensor, "b n"]:
    """Initial codes at these places, uniform over all codes."""
    return (noise.uniform(where, 1, purpose=Purpose.DRAFT)[..., 0] * vocab_size).long()


def build(method: Method, kit: Kit) -> JacobiDrafter:
    """Windows of the target's own draws, which a trained part or the model's EAGLE-1 module may continue."""
    window, init = method.settings["window"], method.settings["init"]
    keeps_laws = method.mode == "jacobi"
    continuation: Continuation | None = None
    if init == "drafter" and method.part is not None:
        from lantern.drafters.parallelspec_drafter_chain import ParallelChain

        module: Any = kit.part(method)
        continuation = ParallelChain(module, kit.target, window=window, is_gumbel=not keeps_laws, sampling=kit.sampling)
    elif init == "drafter":
        from lantern.drafters.eagle_drafter_chain import EagleChain

        if kit.module is None:
            raise ValueError('init is "drafter" and this model has none: use "random" or "repeat-left"')
        continuation = EagleChain(
            kit.module, kit.target, window=window, length=CONTINUED, is_gumbel=not keeps_laws, sampling=kit.sampling
        )
    return JacobiDrafter(kit.target, window=window, init=init, keeps_laws=keeps_laws, continuation=continuation)
