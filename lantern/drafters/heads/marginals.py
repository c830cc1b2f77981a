"""Trees from independent marginals: all nodes of one depth share a distribution (arXiv:2401.10774)."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.buffers import Buffers
from lantern.core.noise import Noise, Purpose
from lantern.core.sampling import Sampling
from lantern.core.types import Drafter, DraftMode, DraftTree, Prefill, Step, Target
from lantern.drafters.base import target_logits
from lantern.drafters.heads.pairs import Pairs
from lantern.drafters.trees.static import StaticTree

PURPOSE_OF_MODE = {"gumbel": Purpose.TARGET, "sampled": Purpose.DRAFT}


class Marginals:
    """Grows a static tree over independent marginals: q_d is the distribution of the d-th token to come.

    q_d does not depend on the tokens before, so the k-th child of every node of a depth is the same token, the k-th
    best of log q_d + g, and a tree costs one top-k over a matrix. In mode "gumbel" g is the target's noise; in mode
    "sampled" it is the drafter's own noise (samples without replacement, one set per depth, independent of the depths
    above); in mode "point" it is zero. ValueError for an unknown mode and for a tree wider than the codebook.
    """

    def __init__(
        self, tree: StaticTree, *, mode: DraftMode, sampling: Sampling, target: Target, records_log_q: bool = False
    ) -> None:
        if mode not in ("gumbel", "sampled", "point"):
            raise ValueError(f'draft mode is "{mode}", wanted gumbel, sampled or point')
        self.width = max(level.width for level in tree.levels())
        if self.width > target.config.vocab_size:
            most = target.config.vocab_size
            raise ValueError(f"the tree has {self.width} children at a node, wanted at most {most}: use a narrower one")
        self.tree, self.target, self.held = tree, target, Buffers()
        self.mode: DraftMode = mode
        self.records_log_q = records_log_q or mode == "sampled"
        # At temperature 0 tokens are ranked by their logits.
        self.draft_sampling = sampling.untruncated() if sampling.is_greedy else sampling
        self.count = target.config.block_size

    def begin(self, noise: Noise, device: torch.device) -> None:
        """Create the constants of the tree on a device."""
        self.noise, self.shape, self.inner = noise, self.tree.shape(device), self.tree.inner(device)
        self.held.ahead = torch.arange(self.tree.depth, device=device)
        self.held.picks = ((self.shape.depths - 1) * self.width + self.shape.ranks)[1:]
        self.held.log_q_rows = self.shape.depths.clamp(max=self.tree.depth - 1)

    def places(self, known: Int[Tensor, " b"]) -> Int[Tensor, "b d"]:
        """Return the numbers of the tokens to come, one per depth."""
        return (known[:, None] + self.held.ahead).clamp(max=self.count - 1)

    def log_q(self, features: Float[Tensor, "b d c"]) -> Float[Tensor, "b d v"]:
        """Return log q of guided features, by the target's head."""
        return self.draft_sampling.filtered(target_logits(self.target, features))

    def draft(self, root: Int[Tensor, "b 1"], features: Float[Tensor, "b d c"], known: Int[Tensor, " b"]) -> DraftTree:
        """Return the tree below the last of `known` tokens, from guided features that predict the tokens to come."""
        sampler = self._sampler()
        if sampler is None:
            return self.grow(root, self.log_q(features), known)
        logits, purpose = target_logits(self.target, features)[:, None], PURPOSE_OF_MODE[self.mode]
        return self._tree(root, sampler(logits, self.places(known), width=self.width, purpose=purpose))

    def grow(self, root: Int[Tensor, "b 1"], log_q: Float[Tensor, "b d v"], known: Int[Tensor, " b"]) -> DraftTree:
        """Return the tree below the last of `known` tokens, from log q of each depth."""
        recorded = log_q[:, self.held.log_q_rows] if self.records_log_q else None
        return self._tree(root, self._best(log_q, known), recorded)

    def _tree(self, root: Int[Tensor, "b 1"], best: Int[Tensor, "b d k"], log_q: Tensor | None = None) -> DraftTree:
        tokens = torch.cat([root, best.flatten(1)[:, self.held.picks]], 1)
        return DraftTree(tokens, self.shape, self.mode, log_q, self.inner)

    def _sampler(self) -> Callable[..., Tensor] | None:
        """Return the function that samples children directly from logits, None where log q is needed."""
        if self.records_log_q or self.mode == "point":
            return None
        return self.target.sampler(self.draft_sampling, self.noise)

    def _best(self, log_q: Float[Tensor, "b d v"], known: Int[Tensor, " b"]) -> Int[Tensor, "b d k"]:
        """Return the children of the nodes of each depth, in sampling order."""
        if self.mode != "point":
            log_q = log_q + self.noise.gumbel(self.places(known), PURPOSE_OF_MODE[self.mode])
        return log_q.topk(self.width, dim=-1).indices


class HeadsConfig(Protocol):
    """Sizes of a module that guesses `depths` tokens at once."""

    @property
    def dim(self) -> int:
        """Width of features."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the codebook."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of an image."""
        ...

    @property
    def depths(self) -> int:
        """Tokens that it guesses at once."""
        ...


def check_fit(config: HeadsConfig, target: Target, tree: StaticTree) -> None:
    """Raise ValueError if the sizes of a module and its target differ, or if the tree is deeper than its guesses."""
    got, wanted = ((sizes.dim, sizes.vocab_size, sizes.block_size) for sizes in (config, target.config))
    if got != wanted:
        raise ValueError(f"the drafter has (dim, tokens, block_size) {got}, its target {wanted}: train one for it")
    if tree.depth > config.depths:
        raise ValueError(
            f"the tree is {tree.depth} deep and the drafter guesses {config.depths} tokens: use a shallower one"
        )


class MarginalDrafter(Drafter):
    """Drafts trees from independent guesses for the tokens ahead, with one pass for all depths.

    `module` has a HeadsConfig. Subclasses define `propose`, and `begin` and `take` if they keep more than the last
    pairs.
    """

    def __init__(
        self,
        module: Any,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        check_fit(module.config, target, tree)
        self.module, self.sampling = module, sampling
        self.mode: DraftMode = mode
        self.marginals = Marginals(tree, mode=mode, sampling=sampling, target=target, records_log_q=records_log_q)
        self.records_log_q = self.marginals.records_log_q
        self.max_nodes, self.depth, self.held = tree.max_nodes, tree.depth, Buffers()

    def begin(self, prefill: Prefill, noise: Noise) -> None:
        """Create the constants of the tree."""
        self.marginals.begin(noise, prefill.mask.device)

    def observe(self, step: Step) -> None:
        """Take the committed tokens with their features."""
        self.take(Pairs.of_step(step, self.sampling, self.module.config.block_size))

    def take(self, pairs: Pairs) -> None:
        """Keep the pairs of a step."""
        self.held.pairs = pairs.tensors

    @property
    def pairs(self) -> Pairs:
        """The pairs of the last step."""
        return Pairs(*self.held.pairs)
