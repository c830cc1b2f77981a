"""Exact verification of a relaxed law: r is put in the place of p, and what that costs is read off."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.types import DraftTree, Leftovers, NoiseSource, Relaxation, Relaxed, Verdict, Verifier


@dataclass(frozen=True)
class RelaxedVerifier:
    """Hands `inner`, an exact verifier, the law r of a `relaxation` at every node whose children q has drawn.

    The codes then follow r, so the price is known in closed form before the walk: TV(r, p) at each node of the
    path, and the relaxation's latent distance. A code x counts as relaxed with probability max(r(x) - p(x), 0) / r(x),
    the share of r(x) that p would not have given. Leaves have no q: there r is p and the price 0. Codes that a window
    keeps for its next turn were drawn from r, which is the q of that turn.

    ValueError for a relaxation that judges codes one by one, for an inner verifier that is not exact, and in the walk
    for a draft without log q.
    """

    relaxation: Relaxation
    inner: Verifier
    is_exact: bool = False
    reads_log_q: bool = True

    def __post_init__(self) -> None:
        if not hasattr(self.relaxation, "relax"):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} accepts codes one by one: give it to RejectionVerifier, which can")
        if not self.inner.is_exact:
            raise ValueError(
                f"{type(self.inner).__name__} is given with a relaxation of its own, wanted GumbelVerifier() or "
                "RejectionVerifier()"
            )

    @property
    def modes(self) -> frozenset[str]:
        """Those of the inner verifier."""
        return self.inner.modes

    @property
    def reads_soft_law(self) -> bool:
        """As the inner verifier."""
        return self.inner.reads_soft_law

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """As the inner verifier, from p."""
        return self.inner.draw(log_p, positions, noise)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Walks by r, and states the price of the nodes on the path."""
        law = self._relax(tree, log_p)
        log_r = law.log_r.view(log_p.shape)
        verdict = self.inner.walk(tree, log_r, positions, noise)
        visited = torch.nn.functional.pad(verdict.path, (1, 0))
        cells = visited[:, :-1] * log_p.shape[-1] + tree.tokens.gather(1, verdict.path)
        owed = log_p.flatten(1).gather(1, cells) - log_r.flatten(1).gather(1, cells)
        distance, left = law.latent_distance, verdict.leftovers
        if left is not None and left.log_q is None:
            left = Leftovers(left.tokens, log_r)
        return replace(
            verdict,
            leftovers=left,
            relaxed=-torch.expm1(owed.nan_to_num().clamp(max=0.0)),
            total_variation=law.total_variation.view(log_p.shape[:2]).gather(1, visited),
            latent_distance=None if distance is None else distance.view(log_p.shape[:2]).gather(1, visited),
        )

    def _relax(self, tree: DraftTree, log_p: Float[Tensor, "b n v"]) -> Relaxed:
        """The law of all nodes as one list of rows: r of those that have children, p of the others."""
        if tree.log_q is None:
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} moves p toward q, and the draft has none: use a drafter that records log q")
        images, nodes = log_p.shape[:2]
        depths = tree.shape.depths.expand(images, nodes)
        if tree.inner is None:
            return self._relax_masked(tree, log_p.flatten(0, 1), depths.flatten())
        # Only inner nodes are computed; they are the same in all images.
        rows = (torch.arange(images, device=depths.device)[:, None] * nodes + tree.inner).flatten()
        flat = log_p.flatten(0, 1)
        found = self.relaxation.relax(
            flat[rows], tree.log_q.flatten(0, 1)[rows], depths=depths.flatten()[rows], levels=tree.shape.depth
        )
        free = torch.zeros_like(flat[:, 0])
        distance = found.latent_distance
        return Relaxed(
            flat.index_copy(0, rows, found.log_r),
            free.index_copy(0, rows, found.total_variation),
            None if distance is None else free.index_copy(0, rows, distance),
        )

    def _relax_masked(self, tree: DraftTree, log_p: Float[Tensor, "m v"], depths: Int[Tensor, " m"]) -> Relaxed:
        """Computes every node, and keeps what is computed for those that have children."""
        assert tree.log_q is not None
        parents = tree.shape.parents.expand(tree.tokens.shape)[:, 1:]
        has_children = torch.zeros_like(tree.tokens, dtype=torch.bool).scatter(1, parents, True).flatten()
        log_q = tree.log_q.flatten(0, 1)
        found = self.relaxation.relax(log_p, log_q, depths=depths, levels=tree.shape.depth)
        distance = found.latent_distance
        return Relaxed(
            torch.where(has_children[:, None], found.log_r, log_p),
            torch.where(has_children, found.total_variation, 0.0),
            None if distance is None else torch.where(has_children, distance, 0.0),
        )
