"""The draft tree: its shape and its tokens."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DraftMode = Literal["point", "sampled", "iid", "gumbel", "jacobi"]


@dataclass(frozen=True)
class TreeShape:
    """Parents of the nodes of a tree: node 0 is the root (the last committed token), parents precede children.

    `parents`, `ranks` (place among its siblings, in the order of sampling) and `depths` are `(n)`, or `(b n)` if images
    differ; the root is its own parent. `ancestors[i, j]`: j is i or an ancestor of i. `widths[d]` is the largest
    number of children of a node of depth d, known on the host: its length is the depth of the tree.
    """

    parents: Int[Tensor, "*b n"]
    ranks: Int[Tensor, "*b n"]
    depths: Int[Tensor, "*b n"]
    ancestors: Bool[Tensor, "*b n n"]
    widths: tuple[int, ...]

    @staticmethod
    @cache
    def chain(depth: int, device: torch.device) -> "TreeShape":
        """Return the shape of a tree without branches; one of depth 0 is the root alone."""
        nodes = torch.arange(depth + 1, device=device)
        ancestors = nodes[:, None] >= nodes
        return TreeShape((nodes - 1).clamp(min=0), torch.zeros_like(nodes), nodes, ancestors, (1,) * depth)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return self.parents.shape[-1]

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.widths)

    @property
    def has_children(self) -> Bool[Tensor, "*b n"]:
        """Which nodes are not leaves."""
        inner = torch.zeros_like(self.parents, dtype=torch.bool)
        return inner.scatter(-1, self.parents[..., 1:], True)


@dataclass(frozen=True)
class Traits:
    """A drafter's data about the nodes that it drafted, from which tree policies are trained.

    `nodes` holds per node the numbers that `lantern.drafters.policies.policy.TRAITS` names, undefined at the root;
    `beams` for each depth from 1 on the best log-probabilities of the nodes whose children were drafted.
    """

    nodes: Float[Tensor, "b n t"]
    beams: Float[Tensor, "b d w"]


@dataclass(frozen=True)
class DraftTree:
    """A drafter's guess: a token for each node, and for rejection the distributions that they were sampled from.

    `mode` is how children were chosen: "point" (without randomness), "sampled" (without replacement, in the order of
    sampling), "iid" (independently), "gumbel" (top-K of log q + the target's own noise), "jacobi" (a chain of which
    each token was sampled from its recorded distribution, given the tokens before it). Row i of `log_q` is the
    distribution from which the children of node i were sampled; rows of leaves are undefined.
    """

    tokens: Int[Tensor, "b n"]
    shape: TreeShape
    mode: DraftMode
    log_q: Float[Tensor, "b n v"] | None = None
    inner: Int[Tensor, " m"] | None = None
    traits: Traits | None = None
