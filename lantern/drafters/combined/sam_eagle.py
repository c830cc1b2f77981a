"""SAM and EAGLE-1 in one tree: the candidates of both drafters share a root.

SAM decoding (arXiv:2411.10666) chooses between retrieval and a drafter by the length of the match. With Gumbel match no
choice is needed: the tokens are the target's for any tree, so both trees are joined at the root and the longer matching
path is taken. Nodes that both propose are scored twice; the result is the same.
"""

import torch

from lantern.core.noise import Noise
from lantern.core.types import Drafter, DraftMode, DraftTree, Prompt, Step, TreeShape
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.lookup.sam import SamDrafter


def joined(first: TreeShape, second: TreeShape) -> TreeShape:
    """Return both trees below one root; nodes of the second follow those of the first."""
    nodes, more = first.num_nodes, second.num_nodes - 1
    shift = torch.where(second.parents[1:] == 0, 0, second.parents[1:] + nodes - 1)
    elder = first.widths[0] * (second.depths[1:] == 1)
    ancestors = torch.zeros(nodes + more, nodes + more, dtype=torch.bool, device=first.parents.device)
    ancestors[:nodes, :nodes] = first.ancestors
    ancestors[nodes:, nodes:], ancestors[:, 0] = second.ancestors[1:, 1:], True
    levels = max(first.depth, second.depth)
    both = [(*shape.widths, *(0,) * (levels - shape.depth)) for shape in (first, second)]
    widths = (both[0][0] + both[1][0], *map(max, both[0][1:], both[1][1:]))
    return TreeShape(
        torch.cat([first.parents, shift]),
        torch.cat([first.ranks, second.ranks[1:] + elder]),
        torch.cat([first.depths, second.depths[1:]]),
        ancestors,
        widths,
    )


class RouterDrafter(Drafter):
    """Two drafters whose trees are joined at the root; both observe every step."""

    mode: DraftMode = "gumbel"

    def __init__(self, eagle: EagleDrafter, sam: SamDrafter) -> None:
        self.eagle, self.sam = eagle, sam
        self.needs_whole_prefix, self.taps = eagle.needs_whole_prefix, eagle.taps
        self.max_nodes, self.depth = eagle.max_nodes + sam.max_nodes - 1, max(eagle.depth, sam.depth)
        eagle.most_committed = self.depth + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Begin both drafters."""
        self.eagle.begin(prompt, noise)
        self.sam.begin(prompt, noise)
        self._shape = joined(self.eagle.shape, self.sam.shape)

    def propose(self) -> DraftTree:
        """Return both trees below the last committed token."""
        tokens = torch.cat([self.eagle.propose().tokens, self.sam.propose().tokens[:, 1:]], 1)
        return DraftTree(tokens, self._shape, self.mode)

    def observe(self, step: Step) -> None:
        """Pass the step to both drafters."""
        self.eagle.observe(step)
        self.sam.observe(step)
