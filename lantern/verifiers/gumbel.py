"""Gumbel match: exact for any draft, because the result does not depend on the draft."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import DraftTree, Leftovers, NoiseSource, Rows, Verdict, VerifierDefaults
from lantern.verifiers.path import deepest_path, parent_values, visit


@dataclass(frozen=True)
class GumbelVerifier(VerifierDefaults):
    """Take the target's argmax(log p + g) at each node and descend if it is one of the children.

    g is the noise with which plain decoding samples that code. The codes are therefore those of plain decoding for any
    drafter, tree, pruning and order. Prior art on chains and lists: arXiv:2408.07978, arXiv:2506.05632.
    """

    modes: frozenset[str] = frozenset({"gumbel", "point", "sampled", "iid", "jacobi"})
    reads_untruncated: bool = False
    reads_samples: bool = True  # `match` is the walk
    reads_rows: bool = True
    is_sample_match: bool = True
    is_exact: bool = True

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Return argmax(log p + g), the code that plain decoding samples."""
        return (log_p + noise.gumbel(positions)).argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Keep the path of children that equal the target's own samples."""
        return self.match(tree, self.draw(log_p, positions, noise), positions)

    def match(self, tree: DraftTree, sampled: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """Run `walk` on the sampled code that follows each node; `positions` is not used."""
        matches = tree.tokens == parent_values(sampled, tree.shape)
        matches[:, 0] = True
        path = deepest_path(matches, tree.shape)
        next_token = sampled.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, leftovers=Leftovers(sampled))

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Run `match`, with samples after the nodes of matching paths only."""
        sampled = torch.full_like(tree.tokens, -1)

        def read(nodes: Int[Tensor, "b m"]) -> Bool[Tensor, "b n"]:
            sampled.scatter_(1, nodes, rows.sample(self, nodes, noise))
            return tree.tokens == parent_values(sampled, tree.shape)

        visit(tree.shape, read, len(sampled))
        return replace(self.match(tree, sampled, positions), leftovers=None)
