"""SAM and EAGLE-1 in one tree: the candidates of both drafters share a root.

SAM decoding (arXiv:2411.10666) chooses between retrieval and a drafter by the length of the match. With Gumbel match no
choice is needed: the tokens are the target's for any tree, so both trees are joined at the root and the longer matching
path is taken. Nodes that both propose are scored twice; the result is the same.
"""

import torch

from lantern.core.sampling import Noise
from lantern.core.types import Buffers, DraftMode, DraftTree, Prompt, Step
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.lookup.sam import SamDrafter
from lantern.drafters.trees.static import StaticTree, TreeDrafter


class RouterDrafter(TreeDrafter):
    """Two drafters whose trees are joined at the root; both observe every step."""

    mode: DraftMode = "gumbel"
    records_log_q = False

    def __init__(self, eagle: EagleDrafter, sam: SamDrafter) -> None:
        self.eagle, self.sam, self.held = eagle, sam, Buffers()
        first = max(choice[0] for choice in eagle.tree.choices) + 1  # children of the root
        later = ((choice[0] + first, *choice[1:]) for choice in sam.tree.choices)
        self.choices = ((), *eagle.tree.choices, *later)
        self.tree = StaticTree(self.choices[1:])
        self.needs_whole_prefix, self.taps = eagle.needs_whole_prefix, eagle.taps
        eagle.most_committed = self.depth + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Begin both drafters."""
        super().begin(prompt, noise)
        self.eagle.begin(prompt, noise)
        self.sam.begin(prompt, noise)
        order = [self.choices.index(choice) for choice in ((), *self.tree.choices)]
        self.held.order = torch.tensor(order, device=prompt.mask.device)
        self.order = self.held.order

    def propose(self) -> DraftTree:
        """Return both trees below the last committed token."""
        return self.drafted([self.eagle.propose().tokens, self.sam.propose().tokens[:, 1:]], [])

    def observe(self, step: Step) -> None:
        """Pass the step to both drafters."""
        self.eagle.observe(step)
        self.sam.observe(step)
