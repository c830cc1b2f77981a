"""ADT-Tree: deep and narrow where the neighbours' drafts were accepted, shallow and wide elsewhere."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.types import Step
from lantern.drafters.policies.policy import (
    Layer,
    Limits,
    Policy,
    State,
    check_share,
)

LEAST, MOST = 0.05, 0.95  # bounds of the acceptance at neighbours


@dataclass(frozen=True)
class AdtTree(Policy):
    """Sets depth and width of a tree of constant size by the acceptance at the left, upper and upper right tokens.

    If these accepted the share a of their drafts, a path of depth d is accepted with probability a^d. The depth is
    where that falls to `end`, and the width is the budget divided by the depth:

        d = round(log(end) / log(a)),  k = budget / d

    Only decided tokens are read. ValueError for `end` outside (0, 1).
    """

    end: float = 0.1
    nodes: int = 15
    reads_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("end", self.end)

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf beyond the depth and width given by the neighbours."""
        assert layer.match is not None
        # At the first depth all three are decided, so depth and width follow from the tree's first token.
        predicted = layer.near.mean(1).clamp(LEAST, MOST)
        depth = (math.log(self.end) / predicted.log()).round().clamp(min=1.0)
        width = (self.nodes / depth).ceil()
        rank = torch.arange(layer.width, device=predicted.device)
        is_out = (layer.depth >= depth)[:, None] | (rank >= width[:, None])
        return layer.match.masked_fill(is_out[:, None], -torch.inf), state


@dataclass(frozen=True)
class AdtBisection(Policy):
    """Inherits depth d and width k of the tree from the tokens before, and moves both after each step by bisection.

    With a the share of the depth d that was accepted,

        a >= `rate`:  d = ceil((d + depth) / 2),  k = floor((k + 1) / 2)          deeper and narrower
        a <  `rate`:  d = floor((d + 1) / 2),     k = ceil((k + width) / 2)       shallower and wider

    Images start with d = `depth` / 2 and k = `width` / 2. Only decided tokens are read. ValueError for a rate outside
    (0, 1].
    """

    rate: float = 0.5
    depth: int = 10
    width: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}, wanted above 0, at most 1")

    def begin(self, size: Limits) -> State:
        """Return depth and width of the first tree of each image."""
        return tuple(torch.full((size.images,), -(-most // 2), device=size.device) for most in (self.depth, self.width))

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf beyond depth and width; only the k best nodes are extended."""
        assert layer.match is not None
        depth, width = state
        rank = torch.arange(layer.width, device=depth.device)
        order = (layer.reach[:, None] > layer.reach[..., None]).sum(-1)
        is_out = (layer.depth >= depth)[:, None, None] | (rank >= width[:, None, None])
        return layer.match.masked_fill(is_out | (order >= width[:, None])[..., None], -torch.inf), state

    def observe(self, state: State, step: Step, chances: Float[Tensor, "b n"]) -> State:
        """Return depth and width after a step; those of finished images do not matter."""
        assert step.verdict is not None
        depth, width = state
        is_good = step.verdict.length >= self.rate * depth
        return (
            torch.where(is_good, (depth + self.depth + 1) // 2, (depth + 1) // 2),
            torch.where(is_good, (width + 1) // 2, (width + self.width + 1) // 2),
        )
