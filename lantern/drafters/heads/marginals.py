"""Trees from independent marginals: all nodes of one depth share a distribution (arXiv:2401.10774)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.buffers import Buffers
from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Prompt, Step, Target
from lantern.drafters.base import PURPOSE_OF_MODE, check_draft, ranking, target_logits
from lantern.drafters.trees.static import StaticTree, TreeDrafter


@dataclass(frozen=True)
class Pairs:
    """m pairs (feature that predicted a token, token) of each image, in raster order; the first `counts` are valid.

    `features` are guidance-combined, F* = f_u + s (f_c - f_u); `start` is the number of the first token, `places` the
    numbers of all tokens, clamped to the image.
    """

    features: Float[Tensor, "b m c"]
    tokens: Int[Tensor, "b m"]
    places: Int[Tensor, "b m"]
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]

    @classmethod
    def of_step(cls, step: Step, sampling: Sampling, count: int) -> "Pairs":
        """Return the tokens that a step committed, for images of `count` tokens."""
        ahead = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        places = (step.start[:, None] + ahead).clamp(max=count - 1)
        features = sampling.guide(step.of_tokens(step.scores.features), places)
        return cls(features, step.tokens, places, step.start, step.counts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields in order."""
        return self.features, self.tokens, self.places, self.start, self.counts

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of committed tokens of each image, these included."""
        return self.start + self.counts

    @property
    def last(self) -> Int[Tensor, "b 1"]:
        """Index of the last committed pair; for finished images, which have none, it is arbitrary."""
        return (self.counts - 1).clamp(min=0)[:, None]

    @property
    def root(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.tokens.gather(1, self.last)

    def last_features(self) -> Float[Tensor, "b 1 c"]:
        """Return the feature that predicted the last committed token."""
        return self.features.gather(1, self.last[..., None].expand(-1, -1, self.features.shape[-1]))


class MarginalDrafter(TreeDrafter):
    """Drafts a static tree over independent marginals: q_d is the distribution of the d-th token to come.

    q_d does not depend on the tokens before, so the k-th child of every node of a depth is the same token, the k-th
    best of log q_d + g, and a tree costs one top-k over a matrix. In mode "gumbel" g is the target's noise; in mode
    "sampled" it is the drafter's own noise (samples without replacement, one set per depth, independent of the depths
    above); in mode "point" it is zero.

    The config of `module` has `dim`, `vocab_size`, `block_size` and the number of `depths` that it guesses at once.
    Subclasses define `propose`, and `begin` and `take` if they keep more than the last pairs. ValueError for an unknown
    mode, for a module of other sizes than the target's, and for a tree that is deeper than its guesses or wider than
    the codebook.
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
        got, wanted = ((c.dim, c.vocab_size, c.block_size) for c in (module.config, target.config))
        if got != wanted:
            raise ValueError(f"the drafter has (dim, tokens, block_size) {got}, its target {wanted}: train one for it")
        if tree.depth > module.config.depths:
            raise ValueError(
                f"the tree is {tree.depth} deep and the drafter guesses {module.config.depths} tokens:"
                " use a shallower one"
            )
        self.width = check_draft(mode, tree, target.config.vocab_size)
        self.module, self.target, self.tree, self.sampling, self.held = module, target, tree, sampling, Buffers()
        self.mode: DraftMode = mode
        self.records_log_q = records_log_q or mode == "sampled"
        self.draft_sampling = ranking(sampling)
        self.count = target.config.block_size

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create the constants of the tree."""
        device = prompt.mask.device
        self.noise, self.shape, self.inner = noise, self.tree.shape(device), self.tree.inner(device)
        self.held.steps_ahead = torch.arange(self.depth, device=device)
        self.held.picks = ((self.shape.depths - 1) * self.width + self.shape.ranks)[1:]
        self.held.log_q_rows = self.shape.depths.clamp(max=self.depth - 1)

    def observe(self, step: Step) -> None:
        """Take the committed tokens with their features."""
        self.take(Pairs.of_step(step, self.sampling, self.count))

    def take(self, pairs: Pairs) -> None:
        """Keep the pairs of a step."""
        self.held.pairs = pairs.tensors

    @property
    def pairs(self) -> Pairs:
        """The pairs of the last step."""
        return Pairs(*self.held.pairs)

    def places(self) -> Int[Tensor, "b d"]:
        """Return the numbers of the tokens to come, one per depth."""
        return (self.pairs.known[:, None] + self.held.steps_ahead).clamp(max=self.count - 1)

    def log_q(self, features: Float[Tensor, "b d c"]) -> Float[Tensor, "b d v"]:
        """Return log q of guided features, by the target's head."""
        return self.draft_sampling.filtered(target_logits(self.target, features))

    def draft(self, features: Float[Tensor, "b d c"]) -> DraftTree:
        """Return the tree below the last committed token, from guided features that predict the tokens to come."""
        direct = not self.records_log_q and self.mode != "point"
        sampler = self.target.sampler(self.draft_sampling, self.noise) if direct else None
        ranker, purpose = self.target.ranker(self.draft_sampling, self.noise), PURPOSE_OF_MODE.get(self.mode)
        given: dict[str, Any] = {"places": self.places(), "width": self.width, "purpose": purpose}
        if sampler is not None:
            return self._tree(sampler(target_logits(self.target, features)[:, None], **given))
        if ranker is not None:
            best, log_q = ranker(target_logits(self.target, features)[:, None], **given)
            return self._tree(best, log_q[:, self.held.log_q_rows] if self.records_log_q else None)
        return self.grow(self.log_q(features))

    def grow(self, log_q: Float[Tensor, "b d v"]) -> DraftTree:
        """Return the tree below the last committed token, from log q of each depth."""
        recorded = log_q[:, self.held.log_q_rows] if self.records_log_q else None
        if self.mode != "point":
            log_q = log_q + self.noise.gumbel(self.places(), PURPOSE_OF_MODE[self.mode])
        return self._tree(log_q.topk(self.width, dim=-1).indices, recorded)

    def _tree(self, best: Int[Tensor, "b d k"], log_q: Tensor | None = None) -> DraftTree:
        tokens = torch.cat([self.pairs.root, best.flatten(1)[:, self.held.picks]], 1)
        return DraftTree(tokens, self.shape, self.mode, log_q, self.inner)
