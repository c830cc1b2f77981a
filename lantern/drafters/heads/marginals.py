"""Trees from independent marginals: all nodes of one depth share a distribution (arXiv:2401.10774)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree, Prompt, Step, Target
from lantern.drafters.base import NetworkDrafter, target_logits


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


class MarginalDrafter(NetworkDrafter):
    """Drafts a static tree over independent marginals: q_d is the distribution of the d-th token to come.

    q_d does not depend on the tokens before, so the k-th child of every node of a depth is the same token, the k-th
    best of log q_d + g, and a tree costs one top-k over a matrix. In mode "sampled" there is one set of samples per
    depth, independent of the depths above.

    The config of `module` also has the number of `depths` that it guesses at once. Subclasses define `propose`, and
    `begin` and `take` if they keep more than the last pairs. ValueError for a tree that is deeper than its guesses.
    """

    def __init__(self, module: Any, target: Target, **how: Any) -> None:
        super().__init__(module, target, **how)
        if self.depth > module.config.depths:
            raise ValueError(
                f"the tree is {self.depth} deep and the drafter guesses {module.config.depths} tokens:"
                " use a shallower one"
            )

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create the constants of the tree."""
        super().begin(prompt, noise)
        self.held.steps_ahead = torch.arange(self.depth, device=prompt.mask.device)
        self.held.picks = ((self.shape.depths - 1) * self.tree.width + self.shape.ranks)[1:]
        self.held.depths = self.shape.depths.clamp(max=self.depth - 1)

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

    def draft(self, features: Float[Tensor, "b d c"]) -> DraftTree:
        """Return the tree below the last committed token, from guided features that predict the tokens to come."""
        logits = target_logits(self.target, features)[:, None]
        return self.grow(*self.children(logits, self.places(), self.tree.width))

    def grow(self, best: Int[Tensor, "b d k"], log_q: Float[Tensor, "b d v"] | None) -> DraftTree:
        """Return the tree below the last committed token, from the best tokens of each depth and their log q."""
        tokens = torch.cat([self.pairs.root, best.flatten(1)[:, self.held.picks]], 1)
        recorded = log_q[:, self.held.depths] if self.records_log_q and log_q is not None else None
        return DraftTree(tokens, self.shape, self.mode, recorded, self.inner)
