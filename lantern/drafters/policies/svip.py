"""SVIP: drafting stops where the drafter's distribution is too uncertain (arXiv:2411.18462)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from lantern.drafters.policies.policy import Layer, StoppingPolicy


@dataclass
class Svip(StoppingPolicy):
    """Drafts nothing below a node whose distribution has sqrt(c H(q)) above `threshold`, with H the entropy in nats.

    By Pinsker's inequality acceptance is at least 1 - sqrt(KL(p, q) / 2), and KL is estimated as a multiple of H(q).
    The constants for text (c 0.15, threshold 0.3) stop at 0.6 nats, below the entropy of most distributions of image
    tokens, so the threshold was refitted. The root is always extended: the paper (equation 7, algorithm 1) tests the
    distribution of the next token before it is drafted. With `keeps`, as in the released code, the distribution of
    the token just drafted is tested: the token stays, and drafting stops behind a depth without a certain node.
    ValueError unless both are positive.
    """

    c: float = 0.15
    threshold: float = 0.65
    keeps: bool = False

    def __post_init__(self) -> None:
        if self.c <= 0 or self.threshold <= 0:
            raise ValueError(f"c {self.c}, threshold {self.threshold}: wanted both above 0")

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below uncertain nodes; with `keeps` below a depth of such nodes."""
        is_over = (self.c * layer.entropy).sqrt() > self.threshold
        if self.keeps:
            before = self._is_over if layer.depth else torch.zeros_like(is_over[:, :1])
            self._is_over = before | is_over.all(1, keepdim=True)
            return before[..., None]
        return (is_over & (layer.depth > 0))[..., None]
