"""The verifier, the rows that it reads, and its verdict."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.types.tree import DraftTree


class Rows(ABC):
    """The target's distribution p: row i is of what follows node i of a tree, which is token number `places[:, i]`.

    With `may_stop` the host may look at values: a row is computed when it is read, so that a verifier reads only the
    nodes that it visits, and stops as soon as it is done. Otherwise all rows are computed once, and a verifier runs the
    same operations whatever the values, without waiting for the device. Both give the same bits.
    """

    places: Int[Tensor, "b n"]
    may_stop: bool

    @abstractmethod
    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image (None: all)."""

    def rounded_log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return `log_p` with bits that depend on the logits only, by `rounded_log_softmax`, where there are logits."""
        return self.log_p(nodes)

    @abstractmethod
    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return what plain decoding samples after these nodes, argmax(log p + g) (None: all)."""

    def untruncated(self) -> "Rows":
        """Return the rows at temperature 1 without filters, whatever the sampling."""
        return self


def rows_at(values: Float[Tensor, "b n v"], nodes: Int[Tensor, "b m"], may_look: bool = False) -> Tensor:
    """Return the rows `(b m v)` of these nodes of each image; with `may_look` that of a single one without a copy."""
    if may_look and nodes.numel() == 1:
        return values.narrow(1, int(nodes), 1)
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]


@dataclass(frozen=True)
class Cost:
    """What a relaxation cost on the accepted path, or in tests of one token each (without the axis d).

    `relaxed[:, j]` is the probability that path node j was accepted only because of the relaxation (0 or 1 where the
    test decides it). `total_variation[:, j]` is the total variation at the node before it (j = length: at the node that
    gave the next token), and `latent_distance[:, j]` the sum of the mass moved there times its L2 distance, None where
    the tokens' vectors are not known. `bound` is what the rule is set to keep of the total variation, None without one.
    """

    relaxed: Float[Tensor, "b d"]
    total_variation: Float[Tensor, "b d1"]
    latent_distance: Float[Tensor, "b d1"] | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a verifier keeps of a tree: the first `length` nodes of `path` (without the root), then `next_token`.

    Entries of `path` past `length` are 0. `cost` is None for exact verifiers. `samples` continue a Jacobi window: a
    token sampled for what follows each node, of which the committed ones come first, and `log_q` the distributions that
    they were sampled from. `samples` is None if not all nodes were read, `log_q` where tokens were sampled with the
    target's own noise, which needs no recorded distribution.
    """

    path: Int[Tensor, "b d"]
    length: Int[Tensor, " b"]
    next_token: Int[Tensor, " b"]
    samples: Int[Tensor, "b n"] | None = None
    log_q: Float[Tensor, "b n v"] | None = None
    cost: Cost | None = None


@runtime_checkable
class Verifier(Protocol):
    """Decides how much of a tree is kept."""

    @property
    def modes(self) -> frozenset[str]:
        """The draft modes that it can verify."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether tokens follow the target's own distribution."""
        ...

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep a path of the tree, and sample the token behind it; a tree of one node gives that token only.

        ValueError for a tree without the log q that it reads.
        """
        ...
