"""ADT-Tree: deep and narrow where the neighbours' drafts were accepted, shallow and wide elsewhere."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from lantern.core.types import Step
from lantern.drafters.policies.policy import Layer, StoppingPolicy, check_share

LEAST, MOST = 0.05, 0.95  # bounds of the acceptance at neighbours


@dataclass
class AdtTree(StoppingPolicy):
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

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is beyond the depth and width given by the neighbours."""
        # At the first depth all three are decided, so depth and width follow from the tree's first token.
        predicted = layer.near.mean(1).clamp(LEAST, MOST)
        depth = (math.log(self.end) / predicted.log()).round().clamp(min=1.0)
        width = (self.nodes / depth).ceil()
        rank = torch.arange(layer.width, device=predicted.device)
        return ((layer.depth >= depth)[:, None] | (rank >= width[:, None]))[:, None]


@dataclass
class AdtBisection(StoppingPolicy):
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

    def begin(self, images: int, device: torch.device) -> None:
        """Set depth and width of the first tree of each image."""
        self.held.depth, self.held.width = (
            torch.full((images,), -(-most // 2), device=device) for most in (self.depth, self.width)
        )

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is beyond depth and width; only the k best nodes are extended."""
        depth, width = self.held.depth, self.held.width
        rank = torch.arange(layer.width, device=depth.device)
        order = (layer.reach[:, None] > layer.reach[..., None]).sum(-1)
        is_out = (layer.depth >= depth)[:, None, None] | (rank >= width[:, None, None])
        return is_out | (order >= width[:, None])[..., None]

    def observe(self, step: Step) -> None:
        """Move depth and width; those of finished images do not matter."""
        assert step.verdict is not None
        depth, width = self.held.depth, self.held.width
        is_good = step.verdict.length >= self.rate * depth
        self.held.depth = torch.where(is_good, (depth + self.depth + 1) // 2, (depth + 1) // 2)
        self.held.width = torch.where(is_good, (width + 1) // 2, (width + self.width + 1) // 2)
