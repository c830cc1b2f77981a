"""Verification of relaxed distributions: exactly, where r replaces p, or greedily at temperature 0.

The total variation that a relaxation costs is reported.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Noise, largest
from lantern.core.types import Cost, DraftTree, Rows, Verdict, Verifier, rows_at
from lantern.verifiers.gumbel import deepest_path, rows_of_parents, visit
from lantern.verifiers.relaxations.neighbours import Neighbourhood
from lantern.verifiers.relaxations.rule import Relaxation


@dataclass(frozen=True)
class RelaxedVerifier:
    """Run `inner`, an exact verifier, on the distribution r of a `relaxation` at every node that has children.

    The tokens then follow r, so the cost has a closed form before the walk: TV(r, p) at each node of the path, and the
    relaxation's latent distance. A token x counts as relaxed with probability max(r(x) - p(x), 0) / r(x), the share of
    r(x) that exceeds p(x). Leaves have no q: there r is p and the cost is 0. Which nodes are leaves must not depend on
    the noise of `rows`. Tokens that a window keeps for its next step lie behind the walk, where no row is relaxed: they
    are sampled from p, which is the q of that step.

    ValueError for a relaxation that tests single tokens, and for an inner verifier that is not exact.
    """

    relaxation: Relaxation
    inner: Verifier
    is_exact = False

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
        return self.complete(self.inner.verify(tree, relaxed, noise), tree, rows, relaxed)

    def complete(self, verdict: Verdict, tree: DraftTree, rows: Rows, relaxed: "RelaxedRows") -> Verdict:
        """Add to the inner verdict the cost, and what a window keeps."""
        if tree.mode == "jacobi" and verdict.samples is not None and verdict.log_q is None:
            is_behind = torch.arange(tree.tokens.shape[1], device=tree.tokens.device) > verdict.length[:, None]
            samples = torch.where(is_behind, rows.sample(), verdict.samples)
            verdict = replace(verdict, samples=samples, log_q=relaxed.before())
        return replace(verdict, cost=relaxed.cost(verdict.path))


class RelaxedRows(Rows):
    """Rows of r, made from rows of p as these are read; `untruncated` rows do not exist.

    The cost at the nodes that were read and the shares of r of the tokens of their children are kept, 0 for all others.
    """

    def __init__(self, relaxation: Relaxation, tree: DraftTree, rows: Rows, noise: Noise) -> None:
        if tree.log_q is None and tree.shape.depth > 0:
            name = type(relaxation).__name__
            raise ValueError(f"{name} moves p toward q, and the draft has no log q: use a drafter that records it")
        self._relaxation, self._tree, self._rows, self._noise = relaxation, tree, rows, noise
        self.places, self.may_stop = rows.places, rows.may_stop
        self._has_children = tree.shape.has_children.expand(tree.tokens.shape)
        self._share, self._spent = torch.zeros(2, *tree.tokens.shape, dtype=torch.float32, device=tree.tokens.device)
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

    def before(self) -> Float[Tensor, "b n v"]:
        """Return log p after all nodes."""
        return self._rows.rounded_log_p()

    def cost(self, path: Int[Tensor, "b d"]) -> Cost:
        """Return the cost of a path."""
        visited = pad(path, (1, 0))
        distance = None if self._distance is None else self._distance.gather(1, visited)
        return Cost(self._share.gather(1, path), self._spent.gather(1, visited), distance)

    def _all(self) -> Float[Tensor, "b n v"]:
        """Return log r after all nodes; only inner nodes are relaxed where they are the same in all images."""
        log_p, inner = self._rows.rounded_log_p(), self._tree.inner_nodes
        if self._tree.shape.depth == 0:
            return log_p
        if inner is None:
            return self._relaxed(torch.arange(log_p.shape[1], device=log_p.device), log_p, self._has_children)
        return log_p.index_copy(1, inner, self._relaxed(inner, log_p[:, inner], None))

    def _relaxed(
        self, nodes: Int[Tensor, "*b m"], log_p: Float[Tensor, "b m v"], has_children: Bool[Tensor, "b m"] | None
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
        share = -torch.expm1(ratio.nan_to_num().clamp(max=0.0).double()).to(ratio.dtype)
        self._share = torch.where(is_read, share, self._share)
        return log_r


@dataclass(frozen=True)
class GreedyVerifier:
    """LANTERN at temperature 0 (arXiv:2410.03355): a child is kept if its raised probability is the largest.

    All nodes are tested at once and the deepest path is kept. Mass is measured on the distribution at temperature 1
    without filters. The total variation is 1 where a token is not the most likely one, else 0; the latent distance is
    that of the claimed mass. Neighbours keep their own mass, which cannot change which token is the largest. Several
    siblings may match; the test is deterministic, so the one that leads deepest is taken. ValueError for a relaxation
    without a greedy form.
    """

    relaxation: Neighbourhood
    modes = frozenset({"point", "gumbel"})
    is_exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.relaxation, Neighbourhood):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} has no greedy form: use bounded, lantern or lantern++, or a temperature above 0")

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep the deepest path of children that are the most likely token, or become it with their neighbours'
        mass.
        """
        tests = ChildTests(self.relaxation, tree, rows.untruncated())
        if rows.may_stop:
            visit(tree.shape, tests.read, len(tree.tokens))
        else:
            tests.read(torch.arange(tree.shape.num_nodes, device=tree.tokens.device).expand(tree.tokens.shape))
        path = deepest_path(tests.matches, tree.shape)
        is_relaxed = ~tests.is_best.gather(1, path.nodes) & (path.nodes > 0)
        claimed = torch.where(is_relaxed, tests.mass.gather(1, path.nodes), 0.0)
        distance = None if tests.reach is None else pad(claimed * tests.reach.gather(1, path.nodes), (0, 1))
        next_token = tests.best.gather(1, path.last[:, None])[:, 0]
        cost = Cost(is_relaxed.float(), pad(is_relaxed.float(), (0, 1)), distance)
        return Verdict(path.nodes, path.length, next_token, cost=cost)


class ChildTests:
    """Tests of the children of nodes whose rows were read; other nodes do not match."""

    reach: Tensor | None = None

    def __init__(self, relaxation: Neighbourhood, tree: DraftTree, rows: Rows) -> None:
        self._relaxation, self._tree, self._rows = relaxation, tree, rows
        self._parents = tree.shape.parents.expand(tree.tokens.shape)
        self._near = relaxation.neighbours(tree.tokens)
        self.best = torch.zeros_like(tree.tokens)
        self.is_best, self.matches = torch.zeros(2, *tree.tokens.shape, dtype=torch.bool, device=tree.tokens.device)
        self.matches[:, 0] = True
        self.mass = torch.zeros(tree.tokens.shape, dtype=torch.float32, device=tree.tokens.device)

    def read(self, nodes: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
        """Test the children of these nodes; return which nodes match."""
        tokens, parents, log_p = self._tree.tokens, self._parents, self._rows.log_p(nodes)
        best = largest(log_p, self._rows.may_stop)
        self.best.scatter_(1, nodes, best)
        is_read, row = rows_of_parents(self._tree, nodes)
        bar = log_p.gather(-1, best[..., None])[..., 0].exp().gather(1, row)
        probs, cells = log_p.exp().flatten(1), row * log_p.shape[-1]
        own = probs.gather(1, cells + tokens)
        around = probs.gather(1, (cells[..., None] + self._near).flatten(1)).view(self._near.shape)
        claim = self._relaxation.claim(tokens, own, around)
        expected = self.best.gather(1, parents)
        is_best = tokens == expected
        raised = own + claim.mass
        matches = is_best | (raised > bar) | ((raised == bar) & (tokens < expected))
        matches[:, 0] = True
        self.is_best = torch.where(is_read, is_best, self.is_best)
        self.matches = torch.where(is_read, matches, self.matches)
        self.mass = torch.where(is_read, claim.mass, self.mass)
        if claim.reach is not None:
            known = torch.zeros_like(claim.reach) if self.reach is None else self.reach
            self.reach = torch.where(is_read, claim.reach, known)
        return self.matches
