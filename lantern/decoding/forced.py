"""Forced codes: codes of an image that are given, so that decoding samples only the others.

At a forced code the target's distribution is that code alone, and so is the draft. Every verifier then accepts it, no
relaxation moves mass there, and the codes that follow are conditioned on it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import DraftTree

LOW = -1e30  # finite, since guidance subtracts logits and their sums are checked


@dataclass(frozen=True)
class PassScores:
    """Scores of a pass, or with a leading image axis those of a step."""

    logits: Float[Tensor, "*rows n v"]
    features: Float[Tensor, "*rows n c"]
    fused: Float[Tensor, "*rows n k"] | None = None


@dataclass(frozen=True)
class ForcedCodes:
    """The given codes of each image, -1 where a code is sampled."""

    codes: Int[Tensor, "b n"]

    def checked(self, *, images: int, codes: int, vocab_size: int) -> "ForcedCodes":
        """Return itself; ValueError for another number of images or codes, and for codes that do not exist."""
        if list(self.codes.shape) != [images, codes]:
            raise ValueError(f"forced codes have shape {list(self.codes.shape)}, wanted {[images, codes]}")
        lowest, highest = int(self.codes.min()), int(self.codes.max())
        if lowest < -1 or highest >= vocab_size:
            raise ValueError(f"forced codes are from {lowest} to {highest}, wanted -1 (free) to {vocab_size - 1}")
        return self

    @property
    def kept(self) -> int:
        """Number of codes that all images keep from the start, at least 1. Waits for the device."""
        return max(int((self.codes >= 0).long().cumprod(1).sum(1).min()), 1)  # sync

    def at(self, places: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Return the codes of these numbers; past the end of the image, the last."""
        return self.codes.gather(1, places.clamp(max=self.codes.shape[1] - 1))

    def logits(self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]) -> Float[Tensor, "b r n v"]:
        """Return logits for these code numbers, with all mass on forced codes, the same in all guidance rows."""
        forced = self.at(places)[:, None, :, None]
        point = torch.full_like(logits, LOW).scatter(-1, forced.clamp(min=0).expand(*logits.shape[:3], 1), 0.0)
        return torch.where(forced < 0, logits, point)

    def tree(self, tree: DraftTree, known: Int[Tensor, " b"]) -> DraftTree:
        """Return a tree below code number `known - 1` that drafts forced codes where there are any."""
        places = known[:, None] - 1 + tree.shape.depths
        forced = self.at(places)
        forced[:, 0] = -1  # the root is a committed code
        log_q = tree.log_q
        if log_q is not None:
            log_q = self.logits(log_q[:, None], places[:, : log_q.shape[1]] + 1)[:, 0]
        return replace(tree, tokens=torch.where(forced < 0, tree.tokens, forced), log_q=log_q)
