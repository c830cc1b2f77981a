"""Dynamic trees: each image keeps its best candidates, in tensors of constant size."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import TreeShape


@dataclass(frozen=True)
class Candidates:
    """Nodes that may be drafted, numbered from the root (0), depth by depth; `parents` are numbers of candidates.

    `values` are sums of log probabilities along the path, which never rise with depth.
    """

    tokens: Int[Tensor, "b p"]
    parents: Int[Tensor, "b p"]
    ranks: Int[Tensor, "b p"]
    depths: Int[Tensor, "b p"]
    values: Float[Tensor, "b p"]

    @classmethod
    def of_root(cls, root: Int[Tensor, "b 1"]) -> "Candidates":
        """Return the root alone."""
        zeros = torch.zeros_like(root)
        return cls(root, zeros, zeros, zeros, zeros.float())

    @property
    def count(self) -> int:
        """Number of candidates."""
        return self.tokens.shape[1]

    def and_more(self, others: "Candidates") -> "Candidates":
        """Return these candidates followed by others."""
        names = [field.name for field in fields(self)]
        return Candidates(*(torch.cat([getattr(self, name), getattr(others, name)], 1) for name in names))

    def chosen(self, which: Int[Tensor, "b n"]) -> "Candidates":
        """Return a selection; `parents` keep their old numbers."""
        return Candidates(*(getattr(self, field.name).gather(1, which) for field in fields(self)))

    def best_nodes(self, nodes: int) -> Int[Tensor, "b n"]:
        """Return the root and the `nodes` best others, in order; values make the parent of each node included.

        values   root 0 | a -1, b -2 | below a: c -1.5, below b: d -2.5
        best_nodes(2)    [root, a, c]
        """
        best = self.values[:, 1:].topk(min(nodes, self.count - 1), dim=1).indices + 1
        return torch.nn.functional.pad(best.sort(dim=1).values, (1, 0))


@dataclass(frozen=True)
class Frontier:
    """The extended nodes of one depth: their numbers among the candidates, and what their children need.

    `parents` are indices in the frontier above; `seen` marks the staged nodes that each sees, its own depth last.
    """

    numbers: Int[Tensor, "b f"]
    parents: Int[Tensor, "b f"]
    tokens: Int[Tensor, "b f"]
    reach: Float[Tensor, "b f"]
    joint: Float[Tensor, "b f"]
    seen: Bool[Tensor, "b f i"]

    @classmethod
    def of_root(cls, root: Int[Tensor, "b 1"]) -> "Frontier":
        """Return the frontier of the root."""
        zeros = torch.zeros_like(root)
        seen = torch.zeros(*root.shape, 0, dtype=torch.bool, device=root.device)
        return cls(zeros, zeros, root, zeros.float(), zeros.float(), seen)

    def below(
        self,
        children: Candidates,
        slots: Int[Tensor, "b m"],
        joint: Float[Tensor, "b m"],
        *,
        first: int,
        width: int,
    ) -> "Frontier":
        """Return the best `width` of its children, numbered from `first`; `slots` are their parents' indices in it."""
        best = children.values.topk(min(width, children.count), dim=1).indices
        parents = slots.gather(1, best)
        own = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        above = self.seen.take_along_dim(parents[..., None], 1)
        return Frontier(
            numbers=first + best,
            parents=parents,
            tokens=children.tokens.gather(1, best),
            reach=children.values.gather(1, best),
            joint=joint.gather(1, best),
            seen=torch.cat([above, own], 2),
        )


def shape_of(candidates: Candidates, kept: Int[Tensor, "b n"], widths: tuple[int, ...]) -> TreeShape:
    """Return the shape of the tree of these candidates, in which a parent comes before its children.

    `widths` are the most children of a node of each depth.
    """
    own = candidates.chosen(kept)
    order = torch.arange(kept.shape[1], device=kept.device)
    numbers = torch.zeros_like(candidates.tokens).scatter(1, kept, order.expand_as(kept))
    parents = numbers.gather(1, own.parents)
    ancestors, above = torch.eye(len(order), dtype=torch.bool, device=kept.device).expand(len(kept), -1, -1), parents
    reach = 1
    while reach <= len(widths):  # every round doubles the number of known ancestors
        ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))
        above, reach = above.gather(1, above), 2 * reach
    return TreeShape(parents, own.ranks, own.depths, ancestors, widths)
