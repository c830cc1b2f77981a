"""The deepest path of matching nodes in a tree, and the visit of a tree along matching nodes.

The path is found in a fixed number of tensor operations without a loop. The visit looks at values after every depth.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lantern.core.types import DraftTree, TreeShape


@dataclass(frozen=True)
class Path:
    """`nodes[:, :length]` from the root's child down; `last` is the node where it ends (0: the root)."""

    nodes: Int[Tensor, "b d"]
    length: Int[Tensor, " b"]
    last: Int[Tensor, " b"]


def parent_values(values: Int[Tensor, "b n"], shape: TreeShape) -> Int[Tensor, "b n"]:
    """Return for each node the value of its parent."""
    return values.gather(1, shape.parents.expand(values.shape))


def rows_of_parents(tree: DraftTree, nodes: Int[Tensor, "b m"]) -> tuple[Bool[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Return for each node of a tree whether its parent is among some `nodes`, and its index there (else 0)."""
    places = torch.arange(nodes.shape[1], device=nodes.device).expand(nodes.shape)
    row = parent_values(torch.full_like(tree.tokens, -1).scatter(1, nodes, places), tree.shape)
    return row >= 0, row.clamp(min=0)


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


def visit(shape: TreeShape, read: Callable[[Int[Tensor, "b m"]], Bool[Tensor, "b n"]], images: int) -> None:
    """Call `read` for the root and then, depth by depth, for the nodes that match and whose ancestors match.

    `read(nodes)` returns which nodes match by all that was read so far; only children of the last `nodes` count. Where
    images have different numbers of nodes, some get others in addition.
    """
    parents, depths = (tensor.expand(images, -1) for tensor in (shape.parents, shape.depths))
    level = depths == 0
    for depth in range(shape.depth + 1):
        count = int(level.sum(1).max())
        if not count:
            return
        matches = read(level.int().topk(count, dim=1).indices)
        level = matches & level.gather(1, parents) & (depths == depth + 1)
