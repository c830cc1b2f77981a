"""Gumbel match: exact for any draft, because the draft never enters the result."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lantern.types import DraftTree, Leftovers, NoiseSource, Verdict
from lantern.verifiers.path import deepest_path, parent_values


@dataclass(frozen=True)
class GumbelVerifier:
    """Takes the target's own argmax(log p + g) at each node and descends if it is one of the children.

    g is the noise by which plain decoding draws that code, so the codes are those of plain decoding whatever the
    drafter, the tree, its pruning or its order. Prior art on chains and lists: arXiv:2408.07978, arXiv:2506.05632.
    """

    modes: frozenset[str] = frozenset({"gumbel", "point", "sampled", "iid", "jacobi"})
    reads_soft_law: bool = False
    reads_draws: bool = True  # the target's own draws are enough: `match` is the walk
    is_exact: bool = True

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """argmax(log p + g), as plain decoding draws."""
        return (log_p + noise.gumbel(positions)).argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Keeps the path of children that are the target's own draws."""
        return self.match(tree, self.draw(log_p, positions, noise), positions)

    def match(self, tree: DraftTree, drawn: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """As `walk`, once the code that follows each node is drawn; where codes stand makes no difference."""
        matches = tree.tokens == parent_values(drawn, tree.shape)
        matches[:, 0] = True
        path = deepest_path(matches, tree.shape)
        next_token = drawn.gather(1, path.last[:, None])[:, 0]
        return Verdict(path.nodes, path.length, next_token, leftovers=Leftovers(drawn))
