"""Gumbel match, and the search for the deepest path that matches: exact, since the result depends on no draft.

The deepest path is found in a fixed number of tensor operations without a loop. A visit looks at values after every
depth.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftTree, Rows, TreeShape, Verdict


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
    if nodes.shape[1] == 1:
        return tree.shape.parents.expand(tree.tokens.shape) == nodes, torch.zeros_like(tree.tokens)
    places = torch.arange(nodes.shape[1], device=nodes.device).expand(nodes.shape)
    row = parent_values(torch.full_like(tree.tokens, -1).scatter(1, nodes, places), tree.shape)
    return row >= 0, row.clamp(min=0)


def deepest_path(matches: Bool[Tensor, "b n"], shape: TreeShape) -> Path:
    """Return the longest path from the root on which every node matches; among equals the one with the lowest end node.

    Nodes with the same tokens from the root on are interchangeable, so the choice among them does not matter.
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

    `read(nodes)` returns which nodes match by all that was read so far; only children of the last `nodes` count. Images
    with fewer such nodes get others too.
    """
    parents, depths = (tensor.expand(images, -1) for tensor in (shape.parents, shape.depths))
    level = depths == 0
    for depth in range(shape.depth + 1):
        count = int(level.sum(1).max())
        if not count:
            return
        matches = read(level.int().topk(count, dim=1).indices)
        level = matches & level.gather(1, parents) & (depths == depth + 1)


@dataclass(frozen=True)
class GumbelVerifier:
    """Take the target's argmax(log p + g) at each node and descend if it is one of the children.

    g is the noise with which plain decoding samples that token. The tokens are therefore those of plain decoding for
    any drafter, tree, pruning and order. Prior art on chains and lists: arXiv:2408.07978, arXiv:2506.05632.
    """

    modes = frozenset({"gumbel", "point", "sampled", "iid", "jacobi"})
    is_exact = True

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep the path of children that equal the target's own samples, the noise of which is that of `rows`."""
        if tree.shape.depth == 0:
            sampled = rows.sample(torch.zeros_like(tree.tokens) if rows.may_stop else None)
            path, length = tree.tokens[:, :0], torch.zeros_like(sampled[:, 0])
            return Verdict(path, length, sampled[:, 0], samples=None if rows.may_stop else sampled)
        sampled = torch.full_like(tree.tokens, -1) if rows.may_stop else rows.sample()

        def read(nodes: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
            sampled.scatter_(1, nodes, rows.sample(nodes))
            return tree.tokens == parent_values(sampled, tree.shape)

        if rows.may_stop:
            visit(tree.shape, read, len(sampled))
        matches = tree.tokens == parent_values(sampled, tree.shape)
        matches[:, 0] = True
        path = deepest_path(matches, tree.shape)
        next_token = sampled.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, samples=None if rows.may_stop else sampled)
