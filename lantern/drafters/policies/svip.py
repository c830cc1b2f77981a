"""SVIP: drafting stops where the drafter's distribution is too uncertain (arXiv:2411.18462)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.drafters.policies.policy import Layer, Limits, Policy, State


@dataclass(frozen=True)
class Svip(Policy):
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

    def begin(self, size: Limits) -> State:
        """Return whether drafting has stopped."""
        return (torch.zeros(size.images, 1, dtype=torch.bool, device=size.device),)

    def plan(self, state: State) -> State:
        """Return the reset state."""
        return (torch.zeros_like(state[0]),)

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf below uncertain nodes."""
        assert layer.match is not None
        is_over = (self.c * layer.entropy).sqrt() > self.threshold
        if self.keeps:
            is_over, state = state[0], (state[0] | is_over.all(1, keepdim=True),)
        elif layer.depth == 0:
            return layer.match, state
        return layer.match.masked_fill(is_over[..., None], -torch.inf), state
