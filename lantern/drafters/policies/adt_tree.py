"""ADT-Tree: deep and narrow where the neighbours' drafts were accepted, shallow and wide elsewhere."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.drafters.policies.policy import ADAPTIVE, GROWTH, WITHOUT_GRAPHS, Layer, State, StatelessPolicy
from lantern.methods.spec import MethodSpec, Setting

LEAST, MOST = 0.05, 0.95  # bounds of the acceptance at neighbours


@dataclass(frozen=True)
class AdtTree(StatelessPolicy):
    """Sets depth and width of a tree of constant size by the acceptance at the left, upper and upper right codes.

    If these accepted the share a of their drafts, a path of depth d is accepted with probability a^d. The depth is
    where that falls to `end`, and the width is the budget divided by the depth:

        d = round(log(end) / log(a)),  k = budget / d

    Only decided codes are read. ValueError for `end` outside (0, 1).
    """

    end: float = 0.1
    nodes: int = 15
    is_predictable: ClassVar[bool] = False
    saves: ClassVar[bool] = True
    reads_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.end < 1:
            raise ValueError(f"end is {self.end}, wanted between 0 and 1")

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf beyond the depth and width given by the neighbours."""
        assert layer.match is not None
        # At the first depth all three are decided, so depth and width follow from the tree's first code.
        predicted = layer.near.mean(1).clamp(LEAST, MOST)
        depth = (math.log(self.end) / predicted.log()).round().clamp(min=1.0)
        width = (self.nodes / depth).ceil()
        rank = torch.arange(layer.width, device=predicted.device)
        is_out = (layer.depth >= depth)[:, None] | (rank >= width[:, None])
        return layer.match.masked_fill(is_out[:, None], -torch.inf), state


METHODS = (
    MethodSpec(
        "adt-tree",
        "ADT-Tree: deep and narrow where drafts of the neighbours did well, shallow and wide elsewhere; exact",
        "eagle",
        drafter="lantern.drafters.eagle.dynamic:build",
        policy=AdtTree,
        settings=(*GROWTH, Setting("end", 0.1, "probability of reaching the last depth", low=0, high=1), ADAPTIVE),
        add_ons=("eagle1",),
        engines=WITHOUT_GRAPHS,
        paper="2512.21857",
    ),
)
