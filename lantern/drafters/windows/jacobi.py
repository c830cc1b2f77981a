"""Jacobi windows: drafting without a network, from the target's own samples of the last pass."""

import math
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.noise import Purpose
from lantern.core.types import (
    DrafterDefaults,
    DraftMode,
    DraftTree,
    Kept,
    NoiseSource,
    Prefill,
    Step,
    Target,
    TreeShape,
    WindowFill,
)
from lantern.drafters.base import Guesses

CONTINUED = 3  # codes that a drafter guesses behind a window; a step rarely frees more places
TRIAL = 10  # steps after which a window that commits fewer than `least` codes a step is given up
INITS = ("random", "repeat-left", "drafter")


class Continuation(Protocol):
    """Guesses the codes behind a window, a few at a time."""

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether it reads all of the target's conditioning slots, padding included."""
        ...

    def begin(self, prefill: Prefill, noise: NoiseSource) -> Guesses:
        """Start a generation: read its prompt and guess behind its first code."""
        ...

    def extend(
        self, features: Float[Tensor, "b r n c"], tokens: Int[Tensor, "b n"], counts: Int[Tensor, " b"]
    ) -> Guesses:
        """Guess behind n codes, each given with the feature that predicts it; the first `counts` are committed."""
        ...


class JacobiDrafter(DrafterDefaults):
    """Drafts a chain of `window` nodes: the last committed code and drafts of those that follow it.

    Every pass of the target samples all codes of the window. Those that are not committed become the next window
    (arXiv:2410.01699, arXiv:2510.24211), followed by the code sampled behind the last node:

        drafted    a b c d       counts 2, leftovers a x y z w: the code that follows the root, a, b, c, d
        drafted    y z w .       a x are committed, x is the root; "." is new

    `init` selects how new places are filled: "random", uniform over all codes; "repeat-left", the code before;
    "drafter", the codes of `continuation`, the last of them repeated. `keeps_distributions` records the distribution
    from which each code was sampled, which coupling needs; without it the drafts are for Gumbel match only. A window is
    at most as long as the image; nodes past the image's end have no effect. ValueError for less than two nodes and
    for an unknown init.

    If the first TRIAL steps commit fewer than `least` codes each, on average over the images, later trees have no
    drafts, as in plain decoding: such steps are faster than those of a window that is seldom right.
    """

    reads_leftovers = True
    reads_kept = True

    def __init__(
        self,
        target: Target,
        *,
        window: int = 16,
        init: str = "random",
        keeps_distributions: bool = True,
        continuation: Continuation | None = None,
        least: float = 0.0,
    ) -> None:
        if window < 2:
            raise ValueError(f"the window is {window}, wanted at least 2: the last code and one draft")
        if init not in INITS:
            raise ValueError(f'init is "{init}", wanted one of {", ".join(INITS)}')
        if (init == "drafter") != (continuation is not None):
            raise ValueError(f'init is "{init}": "drafter" needs a continuation, others take none')
        self.init, self.keeps_distributions, self.continuation = init, keeps_distributions, continuation
        self.least_codes = least
        self.count, self.vocab_size = target.config.block_size, target.config.vocab_size
        self.max_nodes = max(min(window, self.count), 2)
        self.mode: DraftMode = "jacobi" if keeps_distributions else "gumbel"

    @property
    def sample_window(self) -> WindowFill | None:
        """How new places are filled, if drafts are the target's own samples and nothing else."""
        if self.keeps_distributions or self.continuation is not None:
            return None
        return "random" if self.init == "random" else "repeat-left"

    @property
    def needs_host(self) -> bool:
        """Whether the host decides after the trial if windows go on."""
        return self.least_codes > 0

    @property
    def depth(self) -> int:
        """Drafted codes."""
        return self.max_nodes - 1

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether its continuation reads all of the target's conditioning slots."""
        return self.continuation is not None and self.continuation.needs_whole_prefix

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Fill the whole window with initial codes."""
        first, device = prefill.first[:, None], prefill.first.device
        images = len(first)
        self._shape = chain_shape(self.depth, device)
        self._images = torch.arange(images, device=device)[:, None]
        self._steps = torch.arange(self.max_nodes, device=device)
        self._known = torch.ones(images, dtype=torch.long, device=device)
        self._taken = 0
        where = torch.arange(self.count, device=device).expand(images, -1)
        self._random = random_codes(noise, where, self.vocab_size)
        self._fill(first, None if self.continuation is None else self.continuation.begin(prefill, noise))

    def read_kept(self, kept: Kept) -> None:
        """Fill the window behind these codes."""
        ahead = None
        if self.continuation is not None:
            for block in kept.blocks(self.max_nodes):
                counts = torch.full_like(self._known, block.codes.shape[1])
                ahead = self.continuation.extend(block.features, block.codes, counts)
        self._known = self._known + kept.codes.shape[1]
        self._fill(kept.codes[:, -1:], ahead)

    def propose(self) -> DraftTree:
        """Return the current window."""
        return self._tree

    def observe(self, step: Step) -> None:
        """Shift the window by the committed codes and fill its end; ValueError if the verdict has no samples."""
        if step.verdict is None or step.verdict.samples is None:
            raise ValueError("the verifier returned no samples for a window: use Gumbel match or coupling")
        left, ahead = Guesses(step.verdict.samples, step.verdict.log_q), None
        if self.continuation is not None:
            assert step.scores is not None
            features = step.scores.features.unflatten(0, (len(step.counts), -1))
            ahead = self.continuation.extend(features, left.tokens, step.counts)
        self._known, self._taken = self._known + step.counts, self._taken + 1
        if self._taken == TRIAL and is_slow(self._known, self.least_codes):
            self._shape, self._steps = chain_shape(0, self._known.device), self._steps[:1]
        self._shift(left, step.counts, ahead)

    def _fill(self, last: Int[Tensor, "b 1"], ahead: Guesses | None) -> None:
        """Fill the whole window with initial codes behind the last known code."""
        has_log_q = self.keeps_distributions
        log_q = torch.zeros(len(last), 1, self.vocab_size, device=last.device) if has_log_q else None
        self._shift(Guesses(last, log_q), torch.ones_like(self._known), ahead)

    def _shift(self, left: Guesses, counts: Int[Tensor, " b"], ahead: Guesses | None) -> None:
        """Move what is left to the front; row i of log q is for code i of the window, the last row for none."""
        sampled = left.tokens.shape[1]
        index = counts[:, None] + self._steps
        is_new, source = index >= sampled, index.clamp(max=sampled - 1)
        codes = left.tokens.gather(1, source)
        if self.init == "random":
            places = (self._known[:, None] + self._steps).clamp(max=self.count - 1)
            codes = torch.where(is_new, self._random.gather(1, places), codes)
        # Guesses for places that are not free, or past the window, go to the row of the leaf.
        slots = None
        if ahead is not None:
            codes = torch.where(is_new, ahead.tokens[:, -1:], codes)
            steps = torch.arange(ahead.tokens.shape[1], device=codes.device)
            slots = ((sampled - counts)[:, None] + steps).clamp(max=self.depth)
            codes = codes.scatter(1, slots, ahead.tokens)
        log_q = None
        if left.log_q is not None:
            log_q = self._initial_log_q(left.log_q[self._images, source], codes, is_new)
            if ahead is not None and slots is not None:
                assert ahead.log_q is not None
                log_q[self._images, slots] = ahead.log_q
        root = left.tokens.gather(1, (counts - 1).clamp(min=0)[:, None])
        self._tree = DraftTree(torch.cat([root, codes[:, :-1]], 1), self._shape, self.mode, log_q)

    def _initial_log_q(
        self, log_q: Float[Tensor, "b n v"], codes: Int[Tensor, "b n"], is_new: Bool[Tensor, "b n"]
    ) -> Float[Tensor, "b n v"]:
        """Write in place, for new codes, the distribution they were sampled from: uniform, or the code itself."""
        if self.init == "random":
            return log_q.masked_fill_(is_new[..., None], -math.log(self.vocab_size))
        log_q.masked_fill_(is_new[..., None], -torch.inf)
        own = log_q.gather(-1, codes[..., None])
        return log_q.scatter_(-1, codes[..., None], own.masked_fill(is_new[..., None], 0.0))


def is_slow(known: Int[Tensor, " b"], least: float) -> bool:
    """Return whether the first TRIAL steps, after which these codes are known, committed fewer than `least` each."""
    return least > 0 and float((known - 1).double().mean()) < least * TRIAL


def chain_shape(depth: int, device: torch.device) -> TreeShape:
    """Return the shape of a tree without branches."""
    nodes = torch.arange(depth + 1, device=device)
    ancestors = nodes[:, None] >= nodes
    return TreeShape((nodes - 1).clamp(min=0), torch.zeros_like(nodes), nodes, ancestors, (1,) * depth)


def random_codes(noise: NoiseSource, where: Int[Tensor, "b n"], vocab_size: int) -> Int[Tensor, "b n"]:
    """Return initial codes at these places, uniform over all codes."""
    return (noise.uniform(where, 1, purpose=Purpose.DRAFT)[..., 0] * vocab_size).long()
