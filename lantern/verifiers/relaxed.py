"""Exact verification of a relaxed distribution: r replaces p, and the total variation that this costs is reported."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Noise, largest
from lantern.core.types import Cost, DraftTree, Rows, Verdict, Verifier, rows_at
from lantern.verifiers.gumbel import rows_of_parents
from lantern.verifiers.relaxations.rule import Relaxation


@dataclass(frozen=True)
class RelaxedVerifier:
    """Run `inner`, an exact verifier, on the distribution r of a `relaxation` at every node that has children.

    The tokens then follow r, so the cost has a closed form before the walk: TV(r, p) at each node of the path, and the
    relaxation's latent distance. A token x counts as relaxed with probability max(r(x) - p(x), 0) / r(x), the share of
    r(x) that exceeds p(x). Leaves have no q: there r is p and the cost is 0. Tokens that a window keeps for its next
    step lie behind the walk, where no row is relaxed: they are sampled from p, which is the q of that step.

    ValueError for a relaxation that tests single tokens, and for an inner verifier that is not exact.
    """

    relaxation: Relaxation
    inner: Verifier
    is_exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.relaxation, Relaxation):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} tests single tokens: use RejectionVerifier({name}(...))")
        if not self.inner.is_exact:
            raise ValueError(
                f"{type(self.inner).__name__} already has a relaxation, wanted GumbelVerifier() or RejectionVerifier()"
            )

    @property
    def modes(self) -> frozenset[str]:
        """The modes of the inner verifier."""
        return self.inner.modes

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Verify with r, and report the cost of the nodes on the path; ValueError for a tree without log q."""
        relaxed = RelaxedRows(self.relaxation, tree, rows, noise)
        verdict = self.inner.verify(tree, relaxed, noise)
        if tree.mode == "jacobi" and verdict.samples is not None and verdict.log_q is None:
            is_behind = torch.arange(tree.tokens.shape[1], device=tree.tokens.device) > verdict.length[:, None]
            samples = torch.where(is_behind, rows.sample(), verdict.samples)
            verdict = replace(verdict, samples=samples, log_q=rows.rounded_log_p())
        return replace(verdict, cost=relaxed.cost(verdict.path))


class RelaxedRows(Rows):
    """Rows of r, made from rows of p as these are read; `untruncated` rows do not exist.

    The cost at the nodes that were read and log(p / r) of the tokens of their children are kept, 0 for all others.
    """

    def __init__(self, relaxation: Relaxation, tree: DraftTree, rows: Rows, noise: Noise) -> None:
        if tree.log_q is None and tree.shape.depth > 0:
            name = type(relaxation).__name__
            raise ValueError(f"{name} moves p toward q, and the draft has no log q: use a drafter that records it")
        self._relaxation, self._tree, self._rows, self._noise = relaxation, tree, rows, noise
        self.places, self.may_stop = rows.places, rows.may_stop
        self._has_children = tree.shape.has_children.expand(tree.tokens.shape)
        self._log_ratio, self._spent = torch.zeros(
            2, *tree.tokens.shape, dtype=torch.float32, device=tree.tokens.device
        )
        self._distance = self._every = None

    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return log r after these nodes of each image (None: all)."""
        if self.may_stop and nodes is not None:
            has_children = self._has_children.gather(1, nodes)
            if not bool(has_children.any()):
                return self._rows.rounded_log_p(nodes)
            log_p = self._rows.rounded_log_p(nodes)
            return self._relaxed(nodes, log_p, None if bool(has_children.all()) else has_children)
        if self._every is None:
            self._every = self._all()
        return self._every if nodes is None else rows_at(self._every, nodes)

    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return argmax(log r + g) after these nodes (None: all)."""
        places = self.places if nodes is None else self.places.gather(1, nodes)
        return largest(self.log_p(nodes) + self._noise.gumbel(places), self.may_stop)

    def cost(self, path: Int[Tensor, "b d"]) -> Cost:
        """Return the cost of a path."""
        visited = pad(path, (1, 0))
        ratio = self._log_ratio.gather(1, path)
        relaxed = -torch.expm1(ratio.nan_to_num().clamp(max=0.0).double()).to(ratio.dtype)
        distance = None if self._distance is None else self._distance.gather(1, visited)
        return Cost(relaxed, self._spent.gather(1, visited), distance)

    def _all(self) -> Float[Tensor, "b n v"]:
        """Return log r after all nodes; only inner nodes are relaxed where they are the same in all images."""
        log_p, inner = self._rows.rounded_log_p(), self._tree.inner
        if self._tree.shape.depth == 0:
            return log_p
        if inner is None:
            return self._relaxed(torch.arange(log_p.shape[1], device=log_p.device), log_p, self._has_children)
        return log_p.index_copy(1, inner, self._relaxed(inner, log_p[:, inner], None))

    def _relaxed(
        self,
        nodes: Int[Tensor, "*b m"],
        log_p: Float[Tensor, "b m v"],
        has_children: Bool[Tensor, "b m"] | None,
    ) -> Float[Tensor, "b m v"]:
        """Return log r after these nodes, and log p where they have no children (None: all have)."""
        tree = self._tree
        assert tree.log_q is not None
        nodes = nodes.expand(len(log_p), -1)
        found = self._relaxation.relax(
            log_p.flatten(0, 1),
            rows_at(tree.log_q, nodes, self.may_stop).flatten(0, 1),
            depths=tree.shape.depths.expand(tree.tokens.shape).gather(1, nodes).flatten(),
            levels=tree.shape.depth,
        )
        log_r, spent, distance = found.log_r.view(log_p.shape), found.total_variation, found.latent_distance
        if has_children is not None:
            log_r = torch.where(has_children[..., None], log_r, log_p)
            spent = torch.where(has_children.flatten(), spent, 0.0)
            distance = None if distance is None else torch.where(has_children.flatten(), distance, 0.0)
        self._spent.scatter_(1, nodes, spent.view(nodes.shape))
        if distance is not None:
            known = torch.zeros_like(self._spent) if self._distance is None else self._distance
            self._distance = known.scatter(1, nodes, distance.view(nodes.shape))
        is_read, row = rows_of_parents(tree, nodes)
        cells = row * log_p.shape[-1] + tree.tokens
        ratio = log_p.flatten(1).gather(1, cells) - log_r.flatten(1).gather(1, cells)
        self._log_ratio = torch.where(is_read, ratio, self._log_ratio)
        return log_r
