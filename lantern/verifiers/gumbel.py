"""Gumbel match: exact for any draft, because the result does not depend on the draft."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import DraftTree, Leftovers, NoiseSource, Verdict, VerifierDefaults
from lantern.verifiers.path import deepest_path, parent_values


@dataclass(frozen=True)
class GumbelVerifier(VerifierDefaults):
    """Take the target's argmax(log p + g) at each node and descend if it is one of the children.

    g is the noise with which plain decoding samples that code. The codes are therefore those of plain decoding for any
    drafter, tree, pruning and order. Prior art on chains and lists: arXiv:2408.07978, arXiv:2506.05632.
    """

    modes: frozenset[str] = frozenset({"gumbel", "point", "sampled", "iid", "jacobi"})
    reads_untruncated: bool = False
    reads_samples: bool = True  # `match` is the walk
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
