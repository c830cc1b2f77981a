"""Relaxed greedy decoding: at temperature 0 a child is kept if its raised probability is the largest."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.types import Claimant, DraftTree, NoiseSource, Rows, Verdict, VerifierDefaults
from lantern.verifiers.gumbel import deepest_path, rows_of_parents, visit


@dataclass(frozen=True)
class GreedyVerifier(VerifierDefaults):
    """LANTERN at temperature 0 (arXiv:2410.03355): all nodes are tested at once and the deepest path is kept.

    Mass is measured on the distribution at temperature 1 without filters (`reads_untruncated`). The reported total
    variation is the mass claimed from neighbours under it. Neighbours keep their own mass, which cannot change which
    code is the largest. Several siblings may match; the test is deterministic, so the one that leads deepest is taken.
    ValueError for a relaxation without a greedy form.
    """

    relaxation: Claimant
    modes: frozenset[str] = frozenset({"point", "gumbel"})
    reads_untruncated: bool = True
    reads_rows: bool = True
    is_exact: bool = False

    def __post_init__(self) -> None:
        if not self.relaxation.has_greedy_form:
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} has no greedy form: use bounded, lantern or lantern++, or a temperature above 0")

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Return the most likely code, the lowest among equals."""
        return log_p.argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Keep the deepest path of children that are the most likely code, or become it with their neighbours' mass."""
        tests = Tests(self.relaxation, tree)
        tests.read(torch.arange(tree.shape.num_nodes, device=log_p.device).expand(tree.tokens.shape), log_p)
        return tests.verdict()

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Run `walk` with the rows of nodes on matching paths only."""
        tests = Tests(self.relaxation, tree)
        visit(tree.shape, lambda nodes: tests.read(nodes, rows.at(nodes)), len(tree.tokens))
        return tests.verdict()


class Tests:
    """Tests of the children of those nodes whose rows were read; other nodes count as not matching."""

    def __init__(self, relaxation: Claimant, tree: DraftTree) -> None:
        self._relaxation, self._tree = relaxation, tree
        self._parents = tree.shape.parents.expand(tree.tokens.shape)
        self._near = relaxation.neighbours(tree.tokens)
        self._best = torch.zeros_like(tree.tokens)
        self._is_best, self._matches = torch.zeros(2, *tree.tokens.shape, dtype=torch.bool, device=tree.tokens.device)
        self._matches[:, 0] = True
        self._mass = self._reach = None

    def read(self, nodes: Int[Tensor, "b m"], log_p: Float[Tensor, "b m v"]) -> Bool[Tensor, "b n"]:
        """Test the children of these nodes, given their rows; return which nodes match."""
        tokens, parents, codes = self._tree.tokens, self._parents, log_p.shape[-1]
        best = log_p.argmax(-1)
        self._best.scatter_(1, nodes, best)
        is_read, row = rows_of_parents(self._tree, nodes)
        bar = log_p.gather(-1, best[..., None])[..., 0].exp().gather(1, row)
        probs, cells = log_p.exp().flatten(1), row * codes
        own = probs.gather(1, cells + tokens)
        around = probs.gather(1, (cells[..., None] + self._near).flatten(1)).view(self._near.shape)
        claim = self._relaxation.claim(tokens, own, around)
        expected = self._best.gather(1, parents)
        is_best = tokens == expected
        raised = own + claim.mass
        matches = is_best | (raised > bar) | ((raised == bar) & (tokens < expected))
        matches[:, 0] = True
        self._is_best = torch.where(is_read, is_best, self._is_best)
        self._matches = torch.where(is_read, matches, self._matches)
        self._mass = claim.mass if self._mass is None else torch.where(is_read, claim.mass, self._mass)
        if claim.reach is not None:
            self._reach = claim.reach if self._reach is None else torch.where(is_read, claim.reach, self._reach)
        return self._matches

    def verdict(self) -> Verdict:
        """Return the deepest path of matching nodes."""
        assert self._mass is not None
        path = deepest_path(self._matches, self._tree.shape)
        is_relaxed = ~self._is_best.gather(1, path.nodes)
        spent = torch.where(is_relaxed, self._mass.gather(1, path.nodes), 0.0)
        distance = None if self._reach is None else pad(spent * self._reach.gather(1, path.nodes), (0, 1))
        next_token = self._best.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, is_relaxed.float(), pad(spent, (0, 1)), distance)
