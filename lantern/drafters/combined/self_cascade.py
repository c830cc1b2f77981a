"""Self-cascade: a smaller model of the same tokens drafts with the target's noise.

Both models sample argmax(log p + g) with the same g, so a draft is right wherever both distributions have the same
arg-max. The acceptance is the Gumbel coupling of the two models (arXiv:2408.07978). Only the small model is trained.
"""

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftMode, DraftTree, Prompt, Step, Target
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.trees.static import StaticTree, TreeDrafter


class SelfCascadeDrafter(TreeDrafter):
    """Grows a static tree of a small model's samples: the best of log q + g below each node, one small pass per depth.

    Committed tokens are read in the pass that gives the distribution of the first child, so a tree of depth d costs d
    small passes. With `records_log_q` trees carry the small model's log q.
    """

    mode: DraftMode = "gumbel"

    def __init__(
        self, model: Target, target: Target, *, tree: StaticTree, sampling: Sampling, records_log_q: bool = False
    ) -> None:
        self.small = SmallModel(model, target, sampling=sampling, stage=max(tree.depth + 1, tree.num_inner, 1))
        self.tree, self.records_log_q = tree, records_log_q

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        super().begin(prompt, noise)
        self.small.begin(prompt, noise)

    def propose(self) -> DraftTree:
        """Read the committed tokens and grow the tree."""
        ranked, log_qs = [self.small.last], [self.small.read()]
        for depth, level in enumerate(self.levels):
            if depth > 0:
                log_qs.append(self.small.score(ranked[-1][:, level.pairs], level.ancestors, level.first, depth))
            ranked.append(self.small.ranked(log_qs[-1], depth, level.width).flatten(1))
        return self.drafted(ranked, log_qs)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens for the next pass."""
        self.small.take(step)
