"""Relaxed greedy decoding: at temperature 0 a child is kept if its raised probability is the largest."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.types import Claimant, DraftTree, NoiseSource, Verdict, VerifierDefaults
from lantern.verifiers.path import deepest_path, parent_values


@dataclass(frozen=True)
class GreedyVerifier(VerifierDefaults):
    """LANTERN at temperature 0 (arXiv:2410.03355): all nodes are tested at once and the deepest path is kept.

    Mass is measured on the distribution at temperature 1 without filters (`reads_untruncated`). The reported total
    variation is the mass claimed from neighbours under it. Neighbours keep their own mass, which cannot change which
    code is the largest. Several siblings may match; the test is deterministic, so the one that leads deepest is taken.
    """

    relaxation: Claimant
    modes: frozenset[str] = frozenset({"point", "gumbel"})
    reads_untruncated: bool = True
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
        codes, parents = log_p.shape[-1], tree.shape.parents.expand(tree.tokens.shape)
        best = log_p.argmax(-1)
        largest = log_p.gather(-1, best[..., None])[..., 0].exp()
        probs = log_p.exp().flatten(1)
        near = self.relaxation.neighbours(tree.tokens)
        own = probs.gather(1, parents * codes + tree.tokens)
        around = probs.gather(1, ((parents * codes)[..., None] + near).flatten(1)).view(near.shape)
        claim = self.relaxation.claim(tree.tokens, own, around)
        expected, bar = parent_values(best, tree.shape), largest.gather(1, parents)
        is_best = tree.tokens == expected
        raised = own + claim.mass
        matches = is_best | (raised > bar) | ((raised == bar) & (tree.tokens < expected))
        matches[:, 0] = True
        path = deepest_path(matches, tree.shape)
        is_relaxed = ~is_best.gather(1, path.nodes)
        spent = torch.where(is_relaxed, claim.mass.gather(1, path.nodes), 0.0)
        distance = None if claim.reach is None else pad(spent * claim.reach.gather(1, path.nodes), (0, 1))
        next_token = best.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, is_relaxed.float(), pad(spent, (0, 1)), distance)
