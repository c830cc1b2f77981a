"""Trees from independent marginals: all nodes of one depth share a distribution (arXiv:2401.10774)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftTree, Prompt, Step, Target
from lantern.drafters.base import NetworkDrafter, target_logits


class MarginalDrafter(NetworkDrafter):
    """Drafts a static tree over independent marginals: q_d is the distribution of the d-th token to come.

    q_d does not depend on the tokens before, so the k-th child of every node of a depth is the same token, the k-th
    best of log q_d + g, and a tree costs one top-k over a matrix. In mode "sampled" there is one set of samples per
    depth, independent of the depths above.

    The config of `module` also has the number of `depths` that it guesses at once. Subclasses define `propose`, and
    `begin` and `observe` if they keep more than the last pairs. ValueError for a tree that is deeper than its guesses.
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
        """Keep the m committed pairs (feature that predicted a token, token) of each image; the first `counts` count.

        Features are guidance-combined, F* = f_u + s (f_c - f_u). `start` is the number of the first token, `places` are
        those of all, clamped to the image; `last` is the index of the last pair, arbitrary in finished images.
        """
        ahead = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        self.held.hold(start=step.start, counts=step.counts, tokens=step.tokens)
        self.held.places = (step.start[:, None] + ahead).clamp(max=self.count - 1)
        self.held.features = self.sampling.guide(step.of_tokens(step.scores.features), self.held.places)
        self.held.last = (step.counts - 1).clamp(min=0)[:, None]

    @property
    def root(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.held.tokens.gather(1, self.held.last)

    def places(self) -> Int[Tensor, "b d"]:
        """Return the numbers of the tokens to come, one per depth."""
        known = self.held.start + self.held.counts
        return (known[:, None] + self.held.steps_ahead).clamp(max=self.count - 1)

    def draft(self, features: Float[Tensor, "b d c"]) -> DraftTree:
        """Return the tree below the last committed token, from guided features that predict the tokens to come."""
        logits = target_logits(self.target, features)[:, None]
        return self.grow(*self.children(logits, self.places(), self.tree.width))

    def grow(self, best: Int[Tensor, "b d k"], log_q: Float[Tensor, "b d v"] | None) -> DraftTree:
        """Return the tree below the last committed token, from the best tokens of each depth and their log q."""
        tokens = torch.cat([self.root, best.flatten(1)[:, self.held.picks]], 1)
        recorded = log_q[:, self.held.depths] if self.records_log_q and log_q is not None else None
        return DraftTree(tokens, self.shape, self.mode, recorded, self.inner)
