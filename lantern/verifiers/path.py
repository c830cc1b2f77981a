"""The deepest path of matching nodes in a tree, found in a fixed number of tensor operations without a loop."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lantern.core.types import TreeShape


@dataclass(frozen=True)
class Path:
    """`nodes[:, :length]` from the root's child down; `last` is the node where it ends (0: the root)."""

    nodes: Int[Tensor, "b d"]
    length: Int[Tensor, " b"]
    last: Int[Tensor, " b"]


def parent_values(values: Int[Tensor, "b n"], shape: TreeShape) -> Int[Tensor, "b n"]:
    """Return for each node the value of its parent."""
    return values.gather(1, shape.parents.expand(values.shape))


def deepest_path(matches: Bool[Tensor, "b n"], shape: TreeShape) -> Path:
    """Return the longest path from the root on which every node matches; among equals the one with the lowest end node.

    Nodes with the same codes from the root on are interchangeable, so the choice among them does not matter.
    """
    depths = shape.depths.expand(matches.shape)
    is_broken = (shape.ancestors & ~matches[:, None, :]).any(-1)
    reached = torch.where(is_broken, 0, depths)
    last = reached.argmax(1)
    length = reached.gather(1, last[:, None])[:, 0]
    ancestors = shape.ancestors.expand(len(matches), -1, -1)
    on_path = ancestors[torch.arange(len(matches), device=last.device), last]
    order = torch.arange(1, shape.depth + 1, device=last.device)
    is_step = on_path[:, None, :] & (depths[:, None, :] == order[:, None])
    return Path(is_step.long().argmax(-1), length, last)
