"""Forced tokens: tokens of an image that are given, so that decoding samples only the others.

At a forced token the target's distribution is that token alone, and so is the draft. Every verifier then accepts it, no
relaxation moves mass there, and the tokens that follow are conditioned on it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import DraftTree

LOW = -1e30  # finite, since guidance subtracts logits and their sums are checked


@dataclass(frozen=True)
class ForcedTokens:
    """The given tokens of each image, -1 where a token is sampled."""

    tokens: Int[Tensor, "b n"]

    def check(self, *, images: int, tokens: int, vocab_size: int) -> None:
        """Raise ValueError for another number of images or tokens, and for tokens that do not exist."""
        if list(self.tokens.shape) != [images, tokens]:
            raise ValueError(f"forced tokens have shape {list(self.tokens.shape)}, wanted {[images, tokens]}")
        lowest, highest = int(self.tokens.min()), int(self.tokens.max())
        if lowest < -1 or highest >= vocab_size:
            raise ValueError(f"forced tokens are from {lowest} to {highest}, wanted -1 (free) to {vocab_size - 1}")

    @property
    def kept(self) -> int:
        """Number of tokens that all images keep from the start, at least 1. Waits for the device."""
        return max(int((self.tokens >= 0).long().cumprod(1).sum(1).min()), 1)  # sync

    def at(self, places: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Return the tokens of these numbers; past the end of the image, the last."""
        return self.tokens.gather(1, places.clamp(max=self.tokens.shape[1] - 1))

    def logits(self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b r n v"]:
        """Return logits for these token numbers, with all mass on forced tokens, the same in all guidance rows."""
        forced = self.at(places)[:, None, :, None]
        point = torch.full_like(logits, LOW).scatter(-1, forced.clamp(min=0).expand(*logits.shape[:3], 1), 0.0)
        return torch.where(forced < 0, logits, point)

    def tree(self, tree: DraftTree, known: Int[Tensor, " b"]) -> DraftTree:
        """Return a tree below token number `known - 1` that drafts forced tokens where there are any."""
        places = known[:, None] - 1 + tree.shape.depths
        forced = self.at(places)
        forced[:, 0] = -1  # the root is a committed token
        log_q = tree.log_q
        if log_q is not None:
            log_q = self.logits(log_q[:, None], places[:, : log_q.shape[1]] + 1)[:, 0]
        return replace(tree, tokens=torch.where(forced < 0, tree.tokens, forced), log_q=log_q)
