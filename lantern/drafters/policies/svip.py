"""SVIP: drafting stops where the drafter's distribution is too uncertain (arXiv:2411.18462)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.drafters.policies.policy import Layer, Policy, State


@dataclass(frozen=True)
class Svip(Policy):
    """Drafts nothing below a node whose distribution has sqrt(c H(q)) above `threshold`, with H the entropy in nats.

    By Pinsker's inequality acceptance is at least 1 - sqrt(KL(p, q) / 2), and KL is estimated as a multiple of H(q).
    The constants for text (c 0.15, threshold 0.3) stop at 0.6 nats, below the entropy of most distributions of image
    tokens, so the threshold was refitted. The root is always extended. ValueError unless both are positive.
    """

    c: float = 0.15
    threshold: float = 0.65

    def __post_init__(self) -> None:
        if self.c <= 0 or self.threshold <= 0:
            raise ValueError(f"c {self.c}, threshold {self.threshold}: wanted both above 0")

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf below uncertain nodes."""
        assert layer.match is not None
        if layer.depth == 0:
            return layer.match, state
        is_over = (self.c * layer.entropy).sqrt() > self.threshold
        return layer.match.masked_fill(is_over[..., None], -torch.inf), state
