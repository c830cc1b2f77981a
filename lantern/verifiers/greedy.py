"""Relaxed greedy decoding: at temperature 0 a child is kept if its raised probability is the largest."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Noise, largest
from lantern.core.types import Cost, DraftTree, Rows, Verdict
from lantern.verifiers.gumbel import deepest_path, rows_of_parents, visit
from lantern.verifiers.relaxations.neighbours import Neighbourhood


@dataclass(frozen=True)
class GreedyVerifier:
    """LANTERN at temperature 0 (arXiv:2410.03355): all nodes are tested at once and the deepest path is kept.

    Mass is measured on the distribution at temperature 1 without filters. The reported total variation is the mass
    claimed from neighbours under it. Neighbours keep their own mass, which cannot change which token is the largest.
    Several siblings may match; the test is deterministic, so the one that leads deepest is taken.
    ValueError for a relaxation without a greedy form.
    """

    relaxation: Neighbourhood
    modes: frozenset[str] = frozenset({"point", "gumbel"})
    is_exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.relaxation, Neighbourhood):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} has no greedy form: use bounded, lantern or lantern++, or a temperature above 0")

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep the deepest path of children that are the most likely token, or become it with their neighbours'
        mass.
        """
        tests = Tests(self.relaxation, tree, rows.untruncated())
        if rows.may_stop:
            visit(tree.shape, tests.read, len(tree.tokens))
        else:
            tests.read(torch.arange(tree.shape.num_nodes, device=tree.tokens.device).expand(tree.tokens.shape))
        path = deepest_path(tests.matches, tree.shape)
        is_relaxed = ~tests.is_best.gather(1, path.nodes)
        spent = torch.where(is_relaxed, tests.mass.gather(1, path.nodes), 0.0)
        distance = None if tests.reach is None else pad(spent * tests.reach.gather(1, path.nodes), (0, 1))
        next_token = tests.best.gather(1, path.last[:, None])[:, 0]
        cost = Cost(is_relaxed.float(), pad(spent, (0, 1)), distance)
        return Verdict(path.nodes, path.length, next_token, cost=cost)


class Tests:
    """Tests of the children of those nodes whose rows were read; other nodes count as not matching."""

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
