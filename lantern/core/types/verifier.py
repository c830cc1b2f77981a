"""The verifier, its verdict, and the noise that it reads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types.tree import DraftTree


@runtime_checkable
class NoiseSource(Protocol):
    """Noise that depends on (seed, image number, purpose, code number, code) only, as `lantern.core.noise.Noise`."""

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = 1) -> Float[Tensor, "b n v"]:
        """Return standard Gumbel noise of every code at these code numbers."""
        ...

    def uniform(
        self,
        positions: Int[Tensor, "b n"],
        lanes: int,
        *,
        purpose: int = 3,
        iterations: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n lanes"]:
        """Return uniforms, by default of acceptance tests, one lane per sibling; `iterations` give other ones."""
        ...


class Rows(ABC):
    """Log-probabilities of what follows each node of a tree, for verifiers that read them node by node.

    `is_lazy` means that a row is computed when it is read and that the host may look at values: a walk then reads only
    the nodes that it visits, and stops as soon as it is done. Otherwise all rows exist, and a walk must run the same
    operations whatever the values, without waiting for the device. Both give the same bits.
    """

    is_lazy: bool

    @abstractmethod
    def at(self, nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image."""

    @abstractmethod
    def sample(self, verifier: "Verifier", nodes: Int[Tensor, "b m"], noise: NoiseSource) -> Int[Tensor, "b m"]:
        """Return what a verifier's `draw` samples after these nodes."""


@dataclass(frozen=True)
class GivenRows(Rows):
    """Rows that exist: row i of `log_p` is the distribution of code number `positions[i]`."""

    log_p: Float[Tensor, "b n v"]
    positions: Int[Tensor, "b n"]
    is_lazy: bool = False

    def at(self, nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image."""
        return self.log_p[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]

    def sample(self, verifier: "Verifier", nodes: Int[Tensor, "b m"], noise: NoiseSource) -> Int[Tensor, "b m"]:
        """Return what a verifier's `draw` samples after these nodes."""
        return verifier.draw(self.at(nodes), self.positions.gather(1, nodes), noise)


@dataclass(frozen=True)
class Leftovers:
    """A code sampled for what follows each node of a chain, and the distributions, row i for what follows node i.

    The committed codes come first; the others are drafts for the next step. `log_q` is None where codes were sampled
    with the target's own noise, which needs no recorded distribution.
    """

    tokens: Int[Tensor, "b n"]
    log_q: Float[Tensor, "b n v"] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a verifier keeps of a tree: the first `length` nodes of `path` (without the root), then `next_token`.

    Entries of `path` past `length` are 0. `relaxed[:, j]` is the probability that path node j was accepted only because
    of a relaxation (0 or 1 where the test decides it). `total_variation[:, j]` is the total variation at the node
    before it (j = length: at the node that gave `next_token`), and `latent_distance[:, j]` the sum of the mass moved
    there times its L2 distance, None where the codes' vectors are not known. `leftovers` continue a Jacobi window.
    """

    path: Int[Tensor, "b d"]
    length: Int[Tensor, " b"]
    next_token: Int[Tensor, " b"]
    relaxed: Float[Tensor, "b d"] | None = None
    total_variation: Float[Tensor, "b d1"] | None = None
    latent_distance: Float[Tensor, "b d1"] | None = None
    leftovers: Leftovers | None = None


class VerifierDefaults:
    """Defaults of the optional attributes of `Verifier`."""

    reads_samples: bool = False
    reads_rows: bool = False
    reads_log_q: bool = False
    is_sample_match: bool = False

    @property
    def bound(self) -> float | None:
        """None: no bound is set."""
        return None

    def match(self, tree: DraftTree, sampled: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """Raise TypeError: only verifiers with `reads_samples` have it."""
        raise TypeError(f"{type(self).__name__} reads distributions, not samples: call walk")

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Raise TypeError: only verifiers with `reads_rows` have it."""
        raise TypeError(f"{type(self).__name__} reads all distributions at once: call walk")


@runtime_checkable
class Verifier(Protocol):
    """Decides how much of a tree is kept. The defaults of what is optional are in `VerifierDefaults`."""

    @property
    def modes(self) -> frozenset[str]:
        """The draft modes that it can verify."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether codes follow the target's own distribution."""
        ...

    @property
    def reads_untruncated(self) -> bool:
        """Whether it reads the untruncated distribution: temperature 1 without filters, whatever the sampling."""
        ...

    @property
    def reads_samples(self) -> bool:
        """Whether the target's own samples are enough: `match` is then the walk. Optional."""
        ...

    @property
    def reads_rows(self) -> bool:
        """Whether it can read distributions node by node: `descend` is then the walk, without leftovers. Optional."""
        ...

    @property
    def reads_log_q(self) -> bool:
        """Whether it needs a tree's log q. Optional."""
        ...

    @property
    def is_sample_match(self) -> bool:
        """Whether a child is kept exactly if it is the target's own sample: an engine may do it itself. Optional."""
        ...

    @property
    def bound(self) -> float | None:
        """The total variation that one test is set to keep; codes may exceed it. None without one. Optional."""
        ...

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Sample a code from each distribution where there is no draft to test."""
        ...

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Keep a path. Row i of `log_p` is the distribution of code number `positions[i]`."""
        ...

    def match(self, tree: DraftTree, sampled: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """Keep a path, given the code sampled after each node; only with `reads_samples`. Optional."""
        ...

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Keep the path of `walk`, but read only the rows that it visits; only with `reads_rows`. Optional."""
        ...
