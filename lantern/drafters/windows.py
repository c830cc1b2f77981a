"""Jacobi windows: drafters without a network, which reuse the target's own samples of the last pass."""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.config import MAX_NODES
from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.core.types import Buffers, Drafter, DraftMode, DraftTree, Prompt, Step, Target, TreeShape, rows_at
from lantern.drafters.base import ranking
from lantern.drafters.trees import Choice, StaticTree

TRIAL = 10  # steps after which a window that commits fewer than `least` tokens a step is given up
INITS = ("random", "repeat-left")


class JacobiDrafter(Drafter):
    """Drafts a chain of `window` nodes: the last committed token and drafts of those that follow it.

    Every pass of the target samples all tokens of the window. Those that are not committed become the next window
    (arXiv:2410.01699, arXiv:2510.24211), followed by the token sampled behind the last node:

        drafted    a b c d       counts 2, sampled a x y z w: the token that follows the root, a, b, c, d
        drafted    y z w .       a x are committed, x is the root; "." is new

    `init` selects how new places are filled: "random", uniform over all tokens; "repeat-left", the token before.
    `keeps_distributions` records the distribution from which each token was sampled, which coupling needs; without it
    the drafts are for Gumbel match only. A window is at most as long as the image; nodes past the image's end have no
    effect. ValueError for less than two nodes and for an unknown init.

    If the first TRIAL steps commit fewer than `least` tokens each, on average over the images, later trees have no
    drafts, as in plain decoding: such steps are faster than those of a window that is seldom right.
    """

    reads_samples = True

    def __init__(
        self,
        target: Target,
        *,
        window: int = 16,
        init: str = "random",
        keeps_distributions: bool = True,
        least: float = 0.0,
    ) -> None:
        if window < 2:
            raise ValueError(f"the window is {window}, wanted at least 2: the last token and one draft")
        if init not in INITS:
            raise ValueError(f'init is "{init}", wanted one of {", ".join(INITS)}')
        self.init, self.keeps_distributions, self.least = init, keeps_distributions, least
        self.count, self.vocab_size = target.config.block_size, target.config.vocab_size
        self.max_nodes = self.nodes = max(min(window, self.count), 2)
        self.depth = self.max_nodes - 1
        self.mode: DraftMode = "jacobi" if keeps_distributions else "gumbel"
        self.needs_host = least > 0  # it decides after the trial if windows go on
        self.held = Buffers()

    @property
    def window(self) -> "JacobiDrafter | None":
        """Itself, None for a subclass, which may observe otherwise."""
        return self if type(self) is JacobiDrafter else None

    @property
    def is_on_trial(self) -> bool:
        """Whether steps are counted, after which a window that is seldom right ends."""
        return self.least > 0 and self._taken < TRIAL

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        images, device = len(prompt.mask), prompt.mask.device
        self.nodes, self._taken = self.depth + 1, 0
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)
        if self.init == "random":
            where = torch.arange(self.count, device=device).expand(images, -1)
            uniforms = noise.uniform(where, 1, purpose=Purpose.DRAFT)[..., 0]
            self.held.random = (uniforms * self.vocab_size).long()

    def propose(self) -> DraftTree:
        """Return the current window."""
        log_q = self.held.log_q.clone() if self.keeps_distributions else None
        shape = TreeShape.chain(self.nodes - 1, self.held.tokens.device)
        return DraftTree(self.held.tokens.clone(), shape, self.mode, log_q)  # a step outlives the window

    def observe(self, step: Step) -> None:
        """Shift the window by the committed tokens and fill its end, or fill all of it behind given tokens."""
        sampled, log_q, counts = step.tokens[:, -1:], None, torch.ones_like(step.counts)
        if step.verdict is not None:
            assert step.verdict.samples is not None, "the verifier returned no samples for a window"
            sampled, log_q, counts = step.verdict.samples, step.verdict.log_q, step.counts
        elif self.keeps_distributions:
            log_q = torch.zeros(len(counts), 1, self.vocab_size, dtype=torch.float32, device=counts.device)
        self.held.known.add_(step.counts)
        if step.verdict is not None:
            self.count_step(self.held.known)
        self._shift(sampled, log_q, counts)

    def count_step(self, known: Int[Tensor, " b"]) -> None:
        """Count a step after which so many tokens of each image are decided; it may end the window."""
        self._taken += 1
        if self.least > 0 and self._taken == TRIAL and float((known - 1).double().mean()) < self.least * TRIAL:
            self.nodes = 1

    def _shift(
        self, sampled: Int[Tensor, "b n"], log_q: Float[Tensor, "b n v"] | None, counts: Int[Tensor, " b"]
    ) -> None:
        """Move what is left to the front; row i of log q is for token i of the window, the last row for none."""
        steps, size = torch.arange(self.nodes, device=sampled.device), sampled.shape[1]
        index = counts[:, None] + steps
        is_new, source = index >= size, index.clamp(max=size - 1)
        tokens = sampled.gather(1, source)
        if self.init == "random":
            places = (self.held.known[:, None] + steps).clamp(max=self.count - 1)
            tokens = torch.where(is_new, self.held.random.gather(1, places), tokens)
        if log_q is not None:
            self.held.log_q = self._initial_log_q(rows_at(log_q, source), tokens, is_new)
        root = sampled.gather(1, (counts - 1).clamp(min=0)[:, None])
        self.held.tokens = torch.cat([root, tokens[:, :-1]], 1)

    def _initial_log_q(
        self, log_q: Float[Tensor, "b n v"], tokens: Int[Tensor, "b n"], is_new: Bool[Tensor, "b n"]
    ) -> Float[Tensor, "b n v"]:
        """Write in place, for new tokens, the distribution they were sampled from: uniform, or the token itself."""
        if self.init == "random":
            return log_q.masked_fill_(is_new[..., None], -math.log(self.vocab_size))
        log_q.masked_fill_(is_new[..., None], -torch.inf)
        own = log_q.gather(-1, tokens[..., None])
        return log_q.scatter_(-1, tokens[..., None], own.masked_fill(is_new[..., None], 0.0))


def fronted(window: int, width: int, levels: int) -> StaticTree:
    """Return a chain of `window` - 1 drafts whose first `levels` levels are a tree with `width` children per node."""
    choices: set[Choice] = {(0,) * depth for depth in range(1, window)}
    level: list[Choice] = [()]
    for _ in range(min(levels, window - 1)):
        level = [(*choice, rank) for choice in level for rank in range(width)]
        choices.update(level)
    return StaticTree(tuple(choices))


class SjdPacDrafter(JacobiDrafter):
    """SJD-PAC: a small tree at the front of a window, where it is least certain (arXiv:2603.18599).

    The tokens right behind the last committed one were sampled with another token in its place, so they are the most
    likely to be wrong. The paper puts a K-ary tree of samples from these stale distributions there, continues with one
    chain, and couples what is not committed. In the released code the row that is accepted longest is taken even where
    an earlier sibling was not rejected, which changes the distribution. Here the target's arg-max of log p + g decides
    at every node, and the image is that of plain decoding.

        root - 1 - 1 - x - x - x ...    the window, the target's last samples
             |   `- 2                   front: `width` tokens per node, `levels` deep, the best of stale log p + g
             `- 2 - 1
                  `- 2

    New places repeat the token before them. A window is at most as long as the image. ValueError for a window of less
    than two, for a front wider than the codebook, and for one without nodes or with more than MAX_NODES at a depth.
    """

    def __init__(
        self, target: Target, *, sampling: Sampling, window: int = 16, width: int = 3, levels: int = 2
    ) -> None:
        super().__init__(target, window=window, init="repeat-left", keeps_distributions=False)
        if not 1 <= width <= self.vocab_size or levels < 1 or width ** min(levels, self.depth) > MAX_NODES:
            wanted = f"1 to {self.vocab_size} and at least 1, and at most {MAX_NODES} of its nodes at one depth"
            raise ValueError(f"the front is {width} wide, {levels} deep: wanted {wanted}")
        self.draft_sampling = ranking(sampling)
        self.tree, self.width, self.front = fronted(self.nodes, width, levels), width, min(levels, self.depth)
        self.max_nodes = self.tree.max_nodes

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create the constants of the tree."""
        super().begin(prompt, noise)
        device, choices = prompt.mask.device, ((), *self.tree.choices)
        self.noise, self.shape = noise, self.tree.shape(device)
        self.held.chain = torch.tensor([i for i, choice in enumerate(choices) if not any(choice)], device=device)
        # For each node its column in [root, window, second and further tokens of the front].
        self.held.sources = torch.tensor([self._source(choice) for choice in choices], device=device)
        self.held.steps = torch.arange(self.front, device=device)

    def propose(self) -> DraftTree:
        """Return the current window."""
        return DraftTree(self.held.tree.clone(), self.shape, self.mode)  # a step outlives the window

    def observe(self, step: Step) -> None:
        """Shift the window by the committed tokens; the distributions behind it give the front.

        Behind given tokens the whole window repeats the last of them.
        """
        if step.verdict is None:
            super().observe(step)
            front = self.held.tokens[:, :1, None].expand(-1, self.front, self.width)
        else:
            assert step.verdict.samples is not None, "the verifier returned no samples for a window"
            # Node e of the chain samples token start + e, but the last committed one may follow a sibling.
            last = (step.counts - 1).clamp(min=0)[:, None]
            samples = step.verdict.samples[:, self.held.chain].scatter(1, last, step.tokens.gather(1, last))
            super().observe(replace(step, verdict=replace(step.verdict, samples=samples)))
            front = self._front(step)
        # A token that the window already holds is sorted to the end of the candidates, and the next best replaces it.
        own = self.held.tokens[:, 1 : self.front + 1, None]
        others = torch.arange(self.width, device=front.device).expand_as(front)
        order = torch.where(front == own, self.width, others).argsort(-1)
        others = front.gather(2, order)[..., : self.width - 1]
        self.held.tree = torch.cat([self.held.tokens, others.flatten(1)], 1)[:, self.held.sources]

    def _front(self, step: Step) -> Int[Tensor, "b l k"]:
        """Return the best tokens by the first rows behind the committed tokens, with the noise of their new places."""
        rows = self.held.chain[(step.counts[:, None] + self.held.steps).clamp(max=self.depth)]
        logits = step.scores.logits.take_along_dim(rows[:, None, :, None], 2)
        places = (self.held.known[:, None] + self.held.steps).clamp(max=self.count - 1)
        scores = self.draft_sampling.log_probs(logits, places) + self.noise.gumbel(places)
        return scores.topk(self.width, dim=-1).indices

    def _source(self, choice: Choice) -> int:
        depth = len(choice)
        if depth == 0 or choice[-1] == 0:
            return depth
        return 1 + self.depth + (depth - 1) * (self.width - 1) + choice[-1] - 1
