"""Exact verification of a relaxed distribution: r replaces p, and the total variation that this costs is reported."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import (
    DraftTree,
    Leftovers,
    NoiseSource,
    Relaxation,
    Relaxed,
    Rows,
    Verdict,
    Verifier,
    VerifierDefaults,
)
from lantern.verifiers.gumbel import rows_of_parents


@dataclass(frozen=True)
class RelaxedVerifier(VerifierDefaults):
    """Run `inner`, an exact verifier, on the distribution r of a `relaxation` at every node that has children.

    The codes then follow r, so the cost has a closed form before the walk: TV(r, p) at each node of the path, and the
    relaxation's latent distance. A code x counts as relaxed with probability max(r(x) - p(x), 0) / r(x), the share of
    r(x) that exceeds p(x). Leaves have no q: there r is p and the cost is 0. Codes that a window keeps for its next
    step were sampled from r, so r is the q of that step.

    ValueError for a relaxation that tests single codes, for an inner verifier that is not exact, and in `walk` for a
    draft without log q.
    """

    relaxation: Relaxation
    inner: Verifier
    is_exact: bool = False
    reads_log_q: bool = True

    def __post_init__(self) -> None:
        if self.relaxation.judges_codes:
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} tests single codes: use RejectionVerifier({name}(...))")
        if not self.inner.is_exact:
            raise ValueError(
                f"{type(self.inner).__name__} already has a relaxation, wanted GumbelVerifier() or RejectionVerifier()"
            )

    @property
    def modes(self) -> frozenset[str]:
        """The modes of the inner verifier."""
        return self.inner.modes

    @property
    def reads_untruncated(self) -> bool:
        """As for the inner verifier."""
        return self.inner.reads_untruncated

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Sample from p as the inner verifier does."""
        return self.inner.draw(log_p, positions, noise)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Walk with r, and report the total variation of the nodes on the path."""
        relaxed = self._relax(tree, log_p)
        log_r = relaxed.log_r.view(log_p.shape)
        verdict = self.inner.walk(tree, log_r, positions, noise)
        cells = tree.shape.parents * log_p.shape[-1] + tree.tokens
        log_ratio = log_p.flatten(1).gather(1, cells) - log_r.flatten(1).gather(1, cells)
        distance, left = relaxed.latent_distance, verdict.leftovers
        if left is not None and left.log_q is None:
            verdict = replace(verdict, leftovers=Leftovers(left.tokens, log_r))
        spent = relaxed.total_variation.view(log_p.shape[:2])
        return reported(verdict, log_ratio, spent, None if distance is None else distance.view(log_p.shape[:2]))

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Run `walk`, relaxing the rows that the inner verifier reads only."""
        relaxed = RelaxedRows(self.relaxation, tree, rows, positions)
        verdict = self.inner.descend(tree, relaxed, positions, noise)
        return reported(verdict, relaxed.log_ratio, relaxed.total_variation, relaxed.latent_distance)

    @property
    def reads_rows(self) -> bool:
        """As for the inner verifier, if the relaxation gives the same bits row by row."""
        return self.inner.reads_rows and self.relaxation.is_row_wise

    def _relax(self, tree: DraftTree, log_p: Float[Tensor, "b n v"]) -> Relaxed:
        """Return the distributions of all nodes as one list of rows: r for nodes with children, p for the others."""
        log_q = log_q_of(tree, self.relaxation)
        images, nodes = log_p.shape[:2]
        depths = tree.shape.depths.expand(images, nodes)
        if tree.inner is None:
            return self._relax_masked(tree, log_p.flatten(0, 1), depths.flatten())
        # Only inner nodes are computed; their numbers are the same in all images.
        rows = (torch.arange(images, device=depths.device)[:, None] * nodes + tree.inner).flatten()
        flat = log_p.flatten(0, 1)
        found = self.relaxation.relax(
            flat[rows], log_q.flatten(0, 1)[rows], depths=depths.flatten()[rows], levels=tree.shape.depth
        )
        free = torch.zeros_like(flat[:, 0])
        distance = found.latent_distance
        return Relaxed(
            flat.index_copy(0, rows, found.log_r),
            free.index_copy(0, rows, found.total_variation),
            None if distance is None else free.index_copy(0, rows, distance),
        )

    def _relax_masked(self, tree: DraftTree, log_p: Float[Tensor, "m v"], depths: Int[Tensor, " m"]) -> Relaxed:
        """Compute r at every node and keep it at nodes that have children."""
        assert tree.log_q is not None
        has_children = tree.shape.has_children.expand(tree.tokens.shape).flatten()
        log_q = tree.log_q.flatten(0, 1)
        found = self.relaxation.relax(log_p, log_q, depths=depths, levels=tree.shape.depth)
        distance = found.latent_distance
        return Relaxed(
            torch.where(has_children[:, None], found.log_r, log_p),
            torch.where(has_children, found.total_variation, 0.0),
            None if distance is None else torch.where(has_children, distance, 0.0),
        )


def reported(
    verdict: Verdict,
    log_ratio: Float[Tensor, "b n"],
    total_variation: Float[Tensor, "b n"],
    latent_distance: Float[Tensor, "b n"] | None,
) -> Verdict:
    """Return a verdict with its cost, given log(p / r) of every node's code and the cost at every node."""
    visited = torch.nn.functional.pad(verdict.path, (1, 0))
    return replace(
        verdict,
        relaxed=-torch.expm1(log_ratio.gather(1, verdict.path).nan_to_num().clamp(max=0.0)),
        total_variation=total_variation.gather(1, visited),
        latent_distance=None if latent_distance is None else latent_distance.gather(1, visited),
    )


class RelaxedRows(Rows):
    """Rows of r, made from lazy rows of p when they are read.

    The cost at the nodes that were read and log(p / r) of the codes of their children are kept, 0 for all others.
    """

    is_lazy = True

    def __init__(self, relaxation: Relaxation, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"]) -> None:
        self._relaxation, self._tree, self._rows, self._positions = relaxation, tree, rows, positions
        self._log_q = log_q_of(tree, relaxation)
        self.log_ratio, self.total_variation = torch.zeros(2, *positions.shape, device=positions.device)
        self.latent_distance: Tensor | None = None

    def at(self, nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b m v"]:
        """Return log r after these nodes of each image."""
        tree, log_p = self._tree, self._rows.at(nodes)
        shape = tree.shape
        has_children = shape.has_children.expand(tree.tokens.shape).gather(1, nodes)
        if not bool(has_children.any()):
            return log_p
        found = self._relaxation.relax(
            log_p.flatten(0, 1),
            rows_at(self._log_q, nodes).flatten(0, 1),
            depths=shape.depths.expand(tree.tokens.shape).gather(1, nodes).flatten(),
            levels=shape.depth,
        )
        log_r = found.log_r.view(log_p.shape)
        if not bool(has_children.all()):
            log_r = torch.where(has_children[..., None], log_r, log_p)
        spent = found.total_variation.view(nodes.shape)
        self.total_variation.scatter_(1, nodes, torch.where(has_children, spent, 0.0))
        if found.latent_distance is not None:
            distance = torch.where(has_children, found.latent_distance.view(nodes.shape), 0.0)
            known = torch.zeros_like(self.log_ratio) if self.latent_distance is None else self.latent_distance
            self.latent_distance = known.scatter(1, nodes, distance)
        is_read, row = rows_of_parents(tree, nodes)
        cells = row * log_p.shape[-1] + tree.tokens
        ratio = log_p.flatten(1).gather(1, cells) - log_r.flatten(1).gather(1, cells)
        self.log_ratio = torch.where(is_read, ratio, self.log_ratio)
        return log_r

    def sample(self, verifier: Verifier, nodes: Int[Tensor, "b m"], noise: NoiseSource) -> Int[Tensor, "b m"]:
        """Return what a verifier's `draw` samples after these nodes."""
        return verifier.draw(self.at(nodes), self._positions.gather(1, nodes), noise)


def rows_at(values: Float[Tensor, "b n v"], nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b m v"]:
    """Return the rows of these nodes of each image, that of a single one without a copy."""
    if nodes.numel() == 1:
        return values.narrow(1, int(nodes), 1)
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]


def log_q_of(tree: DraftTree, relaxation: Relaxation) -> Float[Tensor, "b n v"]:
    """Return a tree's log q; ValueError if it has none."""
    if tree.log_q is None:
        name = type(relaxation).__name__
        raise ValueError(f"{name} moves p toward q, and the draft has no log q: use a drafter that records it")
    return tree.log_q
