"""Acceptance by depth and rank, counted in the steps of real generations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from lantern.trees.static import StaticTree
from lantern.tuning.costs import non_decreasing
from lantern.tuning.solve import worthiest
from lantern.types import Step, TreeShape

FLOOR = (0.08, 0.04, 0.03, 0.03, *(0.02,) * 4, *(0.01,) * 8)  # of rates by which a probing tree is grown
PRIOR = 4.0  # observations that the depth above counts for


@dataclass
class Tally:
    """A callback that remembers what each step tested and took.

    A tree has few children at most of its nodes, so a rank is only seen where a node has it and its elder siblings
    were refused. What is counted is therefore the chance to be taken of those that were tested.
    """

    codes: int
    depth: int
    width: int
    _steps: list[tuple[TreeShape, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tested: Int[np.ndarray, "d w"] = np.zeros((self.depth, self.width), dtype=np.int64)
        self.taken: Int[np.ndarray, "d w"] = np.zeros((self.depth, self.width), dtype=np.int64)

    def __call__(self, step: Step) -> None:
        """Takes note of a step without waiting for the device."""
        if step.tree is not None and step.verdict is not None:
            self._steps.append((step.tree.shape, step.verdict.path, step.verdict.length, step.start))

    def count(self) -> None:
        """Adds what was noted to `tested` and `taken`; nodes past the end of the picture are left out."""
        for shape, paths, lengths, starts in self._steps:
            children = np.bincount(shape.parents.cpu().numpy()[1:], minlength=shape.num_nodes)
            ranks = shape.ranks.cpu().numpy()
            for path, length, start in zip(paths.tolist(), lengths.tolist(), starts.tolist(), strict=True):
                for depth, node in enumerate([0, *path[:length]]):
                    if depth < self.depth and start + depth < self.codes and children[node]:
                        taken = int(ranks[path[depth]]) if depth < length else None
                        self._enter(depth, min(int(children[node]), self.width), taken)
        self._steps.clear()

    def _enter(self, depth: int, children: int, taken: int | None) -> None:
        last = children if taken is None else min(taken + 1, children)
        self.tested[depth, :last] += 1
        if taken is not None and taken < self.width:
            self.taken[depth, taken] += 1

    def rates(self) -> list[list[float]]:
        """The chance of each rank at each depth, not rising with the rank; see `rates_of`."""
        return rates_of(self.taken, self.tested)


def rates_of(taken: Int[np.ndarray, "d w"], tested: Int[np.ndarray, "d w"]) -> list[list[float]]:
    """Chances that the child of a rank is the one taken, from how often it was among those that were tested.

    A rank that was hardly tested at a depth is believed to do as at the depth above, and at none to be never taken.
    """
    above: Float[np.ndarray, " w"] = np.zeros(taken.shape[1])
    rates = []
    for yes, all_ in zip(taken, tested, strict=True):
        above = (yes + PRIOR * above) / (all_ + PRIOR)
        left = np.concatenate([[1.0], np.cumprod(1 - above)[:-1]])
        rates.append(non_decreasing((above * left)[::-1].tolist())[::-1])
    return rates


def probing_tree(rates: Sequence[Sequence[float]], *, nodes: int, depth: int, width: int) -> StaticTree:
    """A wide tree that tests the ranks which could matter: the worthiest nodes by the rates known so far.

    Rates below FLOOR are raised to it, so that what was not seen yet is looked for.
    """
    raised = [
        [max(rate, floor) for rate, floor in zip(row, FLOOR, strict=False)][:width]
        for row in (rates or [[0.0] * len(FLOOR)] * depth)
    ]
    found = (choice for _, choice in worthiest(raised, depth))
    return StaticTree(tuple(choice for choice, _ in zip(found, range(nodes - 1), strict=False)))
