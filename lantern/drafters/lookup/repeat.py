"""Drafts that copy the neighbours of the next tokens: a baseline of what drafting gains without learning."""

from typing import Literal

import torch

from lantern.core.sampling import Noise
from lantern.core.types import Buffers, Drafter, DraftMode, DraftTree, Prompt, Step, Target, TreeShape


class RepeatDrafter(Drafter):
    """Drafts a chain of `length` tokens, each equal to its neighbour on the `side` "left" or "above".

    Left of the first column is the end of the row above. The first row has none above it and repeats the left one. A
    neighbour that is itself a draft is followed to the token that it repeats. ValueError for another side and for a
    length below 1.
    """

    mode: DraftMode = "point"
    records_log_q = False

    def __init__(self, target: Target, *, side: Literal["left", "above"], length: int) -> None:
        if side not in ("left", "above"):
            raise ValueError(f'side is "{side}", wanted left or above')
        if length < 1:
            raise ValueError(f"length is {length}, wanted at least 1")
        self.count = target.config.block_size
        self.distance = 1 if side == "left" else target.config.raster.columns
        self.depth = min(length, self.count)
        self.max_nodes = self.depth + 1
        self.held = Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Start from the first token."""
        images, device = len(prompt.mask), prompt.mask.device
        self.shape = TreeShape.chain(self.depth, device)
        self.held.ahead = torch.arange(self.depth, device=device)
        self.held.tokens = torch.zeros(images, self.count + self.max_nodes, dtype=torch.long, device=device)
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)

    def observe(self, step: Step) -> None:
        """Append the committed tokens."""
        steps = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        self.held.tokens.scatter_(1, self.held.known[:, None] + steps, step.tokens)
        self.held.known.add_(step.counts)

    def propose(self) -> DraftTree:
        """Repeat the last tokens, a row of them for "above"."""
        last = self.held.known[:, None] - 1
        beside = last + 1 - self.distance + self.held.ahead % self.distance
        places = torch.cat([last, torch.where(beside < 0, last, beside)], 1)
        return DraftTree(self.held.tokens.gather(1, places), self.shape, self.mode)
