"""Gumbel match: exact for any draft, because the result does not depend on the draft; and matching paths in trees.

The deepest path is found in a fixed number of tensor operations without a loop. A visit looks at values after every
depth.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import DraftTree, Leftovers, NoiseSource, Rows, TreeShape, Verdict, VerifierDefaults


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


@dataclass(frozen=True)
class GumbelVerifier(VerifierDefaults):
    """Take the target's argmax(log p + g) at each node and descend if it is one of the children.

    g is the noise with which plain decoding samples that code. The codes are therefore those of plain decoding for any
    drafter, tree, pruning and order. Prior art on chains and lists: arXiv:2408.07978, arXiv:2506.05632.
    """

    modes: frozenset[str] = frozenset({"gumbel", "point", "sampled", "iid", "jacobi"})
    reads_untruncated: bool = False
    reads_samples: bool = True  # `match` is the walk
    reads_rows: bool = True
    is_sample_match: bool = True
    is_exact: bool = True

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Return argmax(log p + g), the code that plain decoding samples."""
        return (log_p + noise.gumbel(positions)).argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Keep the path of children that equal the target's own samples."""
        return self.match(tree, self.draw(log_p, positions, noise), positions)

    def match(self, tree: DraftTree, sampled: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """Run `walk` on the sampled code that follows each node; `positions` is not used."""
        matches = tree.tokens == parent_values(sampled, tree.shape)
        matches[:, 0] = True
        path = deepest_path(matches, tree.shape)
        next_token = sampled.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, leftovers=Leftovers(sampled))

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Run `match`, with samples after the nodes of matching paths only."""
        sampled = torch.full_like(tree.tokens, -1)

        def read(nodes: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
            sampled.scatter_(1, nodes, rows.sample(self, nodes, noise))
            return tree.tokens == parent_values(sampled, tree.shape)

        visit(tree.shape, read, len(sampled))
        return replace(self.match(tree, sampled, positions), leftovers=None)
