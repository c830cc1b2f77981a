"""Acceptance by depth and rank, counted over the steps of real generations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Step, TreeShape
from lantern.drafters.trees.static import StaticTree
from lantern.generation.tuning.costs import non_decreasing
from lantern.generation.tuning.solve import likeliest_nodes

FLOOR = (0.08, 0.04, 0.03, 0.03, *(0.02,) * 4, *(0.01,) * 8)  # least rates for growing a probing tree
PRIOR = 4.0  # weight of the rates of the depth above, in observations


@dataclass
class Tally:
    """Callback that counts which nodes each step tested and accepted.

    A rank is tested only where a node has such a child and its siblings of lower rank were rejected, so the counts
    give the probability of acceptance of tested nodes.
    """

    tokens: int
    depth: int
    width: int
    _steps: list[tuple[TreeShape, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tested: Int[np.ndarray, "d w"] = np.zeros((self.depth, self.width), dtype=np.int64)
        self.taken: Int[np.ndarray, "d w"] = np.zeros((self.depth, self.width), dtype=np.int64)

    def __call__(self, step: Step) -> None:
        """Store a step without waiting for the device."""
        if step.tree is not None and step.verdict is not None:
            self._steps.append((step.tree.shape, step.verdict.path, step.verdict.length, step.start))

    def count(self) -> None:
        """Add the stored steps to `tested` and `taken`, without nodes past the end of the image."""
        for shape, paths, lengths, starts in self._steps:
            children = np.bincount(shape.parents.cpu().numpy()[1:], minlength=shape.num_nodes)
            ranks = shape.ranks.cpu().numpy()
            for path, length, start in zip(paths.tolist(), lengths.tolist(), starts.tolist(), strict=True):
                for depth, node in enumerate([0, *path[:length]]):
                    if depth < self.depth and start + depth < self.tokens and children[node]:
                        taken = int(ranks[path[depth]]) if depth < length else None
                        self._enter(depth, min(int(children[node]), self.width), taken)
        self._steps.clear()

    def _enter(self, depth: int, children: int, taken: int | None) -> None:
        last = children if taken is None else min(taken + 1, children)
        self.tested[depth, :last] += 1
        if taken is not None and taken < self.width:
            self.taken[depth, taken] += 1

    def rates(self) -> list[list[float]]:
        """Return the acceptance rates by depth and rank; see `rates_of`."""
        return rates_of(self.taken, self.tested)


def rates_of(taken: Int[np.ndarray, "d w"], tested: Int[np.ndarray, "d w"]) -> list[list[float]]:
    """Return the probability, by depth and rank, that the child of this rank is the accepted one.

    Rates do not rise with the rank. A rank that was rarely tested at a depth takes the rate of the depth above; at the
    first depth it takes 0.
    """
    above: Float[np.ndarray, " w"] = np.zeros(taken.shape[1])
    rates = []
    for yes, all_ in zip(taken, tested, strict=True):
        above = (yes + PRIOR * above) / (all_ + PRIOR)
        left = np.concatenate([[1.0], np.cumprod(1 - above)[:-1]])
        rates.append(non_decreasing((above * left)[::-1].tolist())[::-1])
    return rates


def probing_tree(rates: Sequence[Sequence[float]], *, nodes: int, depth: int, width: int) -> StaticTree:
    """Return a wide tree of the most likely nodes by the rates known so far, to measure acceptance with.

    Rates below FLOOR are raised to it, so that ranks without observations are tested.
    """
    raised = [
        [max(rate, floor) for rate, floor in zip(row, FLOOR, strict=False)][:width]
        for row in (rates or [[0.0] * len(FLOOR)] * depth)
    ]
    found = (choice for _, choice in likeliest_nodes(raised, depth))
    return StaticTree(tuple(choice for choice, _ in zip(found, range(nodes - 1), strict=False)))
