"""SJD-PAC: a small tree at the front of a Jacobi window, where it is least certain (arXiv:2603.18599).

The tokens right behind the last committed one were sampled with another token in its place, so they are the most likely
to be wrong. The paper puts a K-ary tree of samples from these stale distributions there, continues with one chain, and
couples what is not committed. In the released code the row that is accepted longest is taken even where an earlier
sibling was not rejected, which changes the distribution. Here the target's arg-max of log p + g decides at every node,
and the image is that of plain decoding.

    root - 1 - 1 - x - x - x ...    the window, the target's last samples
         |   `- 2                   front: `width` tokens per node, `levels` deep, the best of stale log p + g
         `- 2 - 1
              `- 2
"""

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Buffers, DraftMode, DraftTree, Prompt, Step, Target
from lantern.drafters.base import ranking
from lantern.drafters.trees.static import Choice, StaticTree, TreeDrafter


def fronted(window: int, width: int, levels: int) -> StaticTree:
    """Return a chain of `window` - 1 drafts whose first `levels` levels are a tree with `width` children per node."""
    choices: set[Choice] = {(0,) * depth for depth in range(1, window)}
    level: list[Choice] = [()]
    for _ in range(min(levels, window - 1)):
        level = [(*choice, rank) for choice in level for rank in range(width)]
        choices.update(level)
    return StaticTree(tuple(choices))


class SjdPacDrafter(TreeDrafter):
    """Windows of the target's own samples with a tree at the front.

    New places repeat the token before them. A window is at most as long as the image. ValueError for a window of less
    than two, for a front wider than the codebook, and for a front without nodes.
    """

    mode: DraftMode = "gumbel"
    reads_samples = True

    def __init__(
        self, target: Target, *, sampling: Sampling, window: int = 16, width: int = 3, levels: int = 2
    ) -> None:
        if window < 2:
            raise ValueError(f"the window is {window}, wanted at least 2: the last token and one draft")
        if not 1 <= width <= target.config.vocab_size or levels < 1:
            raise ValueError(
                f"the front is {width} wide, {levels} deep: wanted 1 to {target.config.vocab_size}, and at least 1"
            )
        self.held, self.sampling, self.count = Buffers(), sampling, target.config.block_size
        self.draft_sampling = ranking(sampling)
        window = max(min(window, self.count), 2)
        self.tree, self.width, self.front = fronted(window, width, levels), width, min(levels, window - 1)

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create the constants of the tree."""
        super().begin(prompt, noise)
        device = prompt.mask.device
        choices = ((), *self.tree.choices)
        chain = [i for i, choice in enumerate(choices) if not any(choice)]
        self.held.chain = torch.tensor(chain, device=device)
        # For each node its column in [root, window, second and further tokens of the front].
        self.held.sources = torch.tensor([self._source(choice) for choice in choices], device=device)
        self.held.known = torch.zeros(len(prompt.mask), dtype=torch.long, device=device)
        self.held.steps = torch.arange(self.depth, device=device)

    def propose(self) -> DraftTree:
        """Return the current window."""
        return DraftTree(self.held.tokens.clone(), self.shape, self.mode)  # a step outlives the window

    def observe(self, step: Step) -> None:
        """Shift the window by the committed tokens; the distributions behind it give the front.

        Behind given tokens the whole window repeats the last of them.
        """
        counts = step.counts
        self.held.known.add_(counts)
        root = step.tokens.gather(1, (counts - 1).clamp(min=0)[:, None])
        if step.verdict is None:
            self._build(root, root.expand(-1, self.depth), root[..., None].expand(-1, self.front, self.width))
            return
        assert step.verdict.samples is not None, "the verifier returned no samples for a window"
        # Row e of the chain is the distribution of token start + e in this pass.
        sampled = step.verdict.samples[:, self.held.chain]
        index = counts[:, None] + self.held.steps
        window = sampled.gather(1, index.clamp(max=self.depth))
        window = torch.where(
            index > self.depth, torch.where(counts[:, None] > self.depth, root, sampled[:, -1:]), window
        )
        self._build(root, window, self._front(step, index[:, : self.front]))

    def _front(self, step: Step, index: Int[Tensor, "b l"]) -> Int[Tensor, "b l k"]:
        """Return the best tokens by these rows of the chain, with the noise of their new places."""
        rows = self.held.chain[index.clamp(max=self.depth)]
        logits = step.scores.logits.take_along_dim(rows[:, None, :, None], 2)
        places = (self.held.known[:, None] + self.held.steps[: self.front]).clamp(max=self.count - 1)
        scores = self.draft_sampling.log_probs(logits, places) + self.noise.gumbel(places)
        return scores.topk(self.width, dim=-1).indices

    def _build(self, root: Int[Tensor, "b 1"], window: Int[Tensor, "b d"], front: Int[Tensor, "b l k"]) -> None:
        """Arrange tokens as a tree; a token that the window already holds is replaced by the next best."""
        own = window[:, : self.front, None]
        others = torch.arange(self.width, device=root.device).expand_as(front)
        # The window's own token is sorted to the end of the candidates and dropped.
        order = torch.where(front == own, self.width, others).argsort(-1)
        others = front.gather(2, order)[..., : self.width - 1]
        tokens = torch.cat([root, window, others.flatten(1)], 1)
        self.held.tokens = tokens[:, self.held.sources]

    def _source(self, choice: Choice) -> int:
        depth = len(choice)
        if depth == 0 or choice[-1] == 0:
            return depth
        return 1 + self.depth + (depth - 1) * (self.width - 1) + choice[-1] - 1
