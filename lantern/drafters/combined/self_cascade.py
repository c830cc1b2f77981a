"""Self-cascade: a smaller model of the same tokens drafts with the target's noise.

Both models sample argmax(log p + g) with the same g, so a draft is right wherever both distributions have the same
arg-max. The acceptance is the Gumbel coupling of the two models (arXiv:2408.07978). Only the small model is trained.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Prompt, Step, Target
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.trees.static import StaticTree, TreeDrafter


class SelfCascadeDrafter(SmallModel, TreeDrafter):
    """Grows a static tree of a small model's samples: the best of log q + g below each node, one small pass per depth.

    Committed tokens are read in the pass that gives the distribution of the first child, so a tree of depth d costs d
    small passes. With `records_log_q` trees carry the small model's log q.
    """

    mode: DraftMode = "gumbel"

    def __init__(
        self, model: Target, target: Target, *, tree: StaticTree, sampling: Sampling, records_log_q: bool = False
    ) -> None:
        super().__init__(model, target, sampling=sampling, stage=max(tree.depth + 1, tree.num_inner, 1))
        self.tree, self.records_log_q = tree, records_log_q

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        super().begin(prompt, noise)
        device = prompt.mask.device
        self.shape, self.levels = self.tree.shape(device), self.tree.levels(device)
        self._log_q_rows, self._inner = self.tree.log_q_rows(device), self.tree.inner(device)
        self.held.depths = torch.arange(self.tree.depth + 1, device=device)

    def propose(self) -> DraftTree:
        """Read the committed tokens and grow the tree."""
        tokens, log_q, log_qs = [self.last], self.read(), []
        for depth, level in enumerate(self.levels):
            if depth > 0:
                inner, here = tokens[-1][:, level.pairs], self.held.depths[depth : depth + 1]
                log_q = self.score(inner, level.ancestors, level.first, here.expand(inner.shape[1]))
            log_qs.append(log_q)
            tokens.append(self._rank(log_q, depth, level.width).flatten(1)[:, level.picks])
        recorded = torch.cat(log_qs, 1)[:, self._log_q_rows] if self.records_log_q else None
        return DraftTree(torch.cat(tokens, 1), self.shape, self.mode, recorded, self._inner)

    def _rank(self, log_q: Float[Tensor, "b f v"], depth: int, width: int) -> Int[Tensor, "b f k"]:
        """Return the children of each node in sampling order."""
        return self.ranked(log_q, self.held.depths[depth : depth + 1], width)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens for the next pass."""
        self.take(step)
