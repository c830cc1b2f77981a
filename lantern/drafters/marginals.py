"""Trees of drafters that guess several codes at once: all nodes of one depth share a law (arXiv:2401.10774)."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.decoding.draws import quick_draws
from lantern.drafters.chooser import Chooser
from lantern.drafters.target_head import target_logits
from lantern.noise import Purpose
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree
from lantern.types import DraftMode, DraftTree, NoiseSource, Target

PURPOSE_OF_MODE = {"gumbel": Purpose.TARGET, "sampled": Purpose.DRAFT}


class Marginals:
    """Grows a static tree over independent marginals: q_d is the law of the d-th code to come, whatever stands before.

    So the k-th child of every node of a depth is the same code, the k-th best of log q_d + g, and a tree costs one
    top-k over a matrix. Mode "gumbel" takes the target's own g, "sampled" its own (draws without replacement, one set
    a depth, independent of those above), "point" none. ValueError for a mode or a tree that cannot be had.
    """

    def __init__(
        self, tree: StaticTree, *, mode: DraftMode, sampling: Sampling, target: Target, records_log_q: bool = False
    ) -> None:
        if mode not in ("gumbel", "sampled", "point"):
            raise ValueError(f'draft mode is "{mode}", wanted gumbel, sampled or point')
        self.width = max(level.width for level in tree.levels())
        if self.width > target.config.vocab_size:
            raise ValueError("the tree has nodes with more children than there are codes: use a narrower one")
        self.tree, self.target = tree, target
        self.mode: DraftMode = mode
        self.records_log_q = records_log_q or mode == "sampled"
        # At temperature 0 codes are ranked by their logits.
        self.law = sampling.soft() if sampling.is_greedy else sampling
        self.count = target.config.block_size
        self.chooser: Chooser | None = None

    def begin(self, noise: NoiseSource, device: torch.device) -> None:
        """Makes the constants of the tree on a device."""
        self.noise, self.shape, self.inner = noise, self.tree.shape(device), self.tree.inner(device)
        self._ahead = torch.arange(self.tree.depth, device=device)
        self._picks = ((self.shape.depths - 1) * self.width + self.shape.ranks)[1:]
        self._law_rows = self.shape.depths.clamp(max=self.tree.depth - 1)

    def places(self, known: Int[Tensor, " b"]) -> Int[Tensor, "b d"]:
        """Code numbers of the codes to come, one a depth."""
        return (known[:, None] + self._ahead).clamp(max=self.count - 1)

    def log_q(self, features: Float[Tensor, "b d c"]) -> Float[Tensor, "b d v"]:
        """The laws that guided features stand for, by the target's own head."""
        return self.law.filtered(target_logits(self.target, features))

    def draft(self, root: Int[Tensor, "b 1"], features: Float[Tensor, "b d c"], known: Int[Tensor, " b"]) -> DraftTree:
        """The tree below the last of `known` codes, of guided features that predict those to come."""
        draws = self._draws()
        if draws is None:
            return self.grow(root, self.log_q(features), known)
        logits, purpose = target_logits(self.target, features)[:, None], PURPOSE_OF_MODE[self.mode]
        return self._tree(root, draws(logits, self.places(known), width=self.width, purpose=purpose))

    def grow(self, root: Int[Tensor, "b 1"], log_q: Float[Tensor, "b d v"], known: Int[Tensor, " b"]) -> DraftTree:
        """The tree below the last of `known` codes of each image."""
        laws = log_q[:, self._law_rows] if self.records_log_q else None
        return self._tree(root, self._best(log_q, known), laws)

    def _tree(self, root: Int[Tensor, "b 1"], best: Int[Tensor, "b d k"], laws: Tensor | None = None) -> DraftTree:
        tokens = torch.cat([root, best.flatten(1)[:, self._picks]], 1)
        return DraftTree(tokens, self.shape, self.mode, laws, self.inner)

    def _draws(self) -> Callable[..., Tensor] | None:
        """What draws children straight from logits, where nobody asks for laws."""
        if self.records_log_q or self.mode == "point" or self.chooser is not None:
            return None
        return quick_draws(self.target, self.law, self.noise)

    def _best(self, log_q: Float[Tensor, "b d v"], known: Int[Tensor, " b"]) -> Int[Tensor, "b d k"]:
        """The children of the nodes of each depth, in draw order."""
        if self.chooser is not None:
            laws = log_q.split(1, dim=1)
            return torch.cat([self.chooser.children(law, depth, self.width) for depth, law in enumerate(laws)], 1)
        if self.mode != "point":
            log_q = log_q + self.noise.gumbel(self.places(known), PURPOSE_OF_MODE[self.mode])
        return log_q.topk(self.width, dim=-1).indices


def check_fit(config: object, target: Target, tree: StaticTree) -> None:
    """ValueError where a module of several depths was made for a target of other sizes, or has too few for a tree."""
    names = ("dim", "vocab_size", "block_size")
    got, wanted = (tuple(getattr(sizes, name) for name in names) for sizes in (config, target.config))
    if got != wanted:
        raise ValueError(f"the drafter has (dim, codes, block_size) {got}, its target {wanted}: they do not belong")
    depths = getattr(config, "depths", tree.depth)
    if tree.depth > depths:
        raise ValueError(f"the tree is {tree.depth} deep and the drafter guesses {depths} codes: use a shallower one")
