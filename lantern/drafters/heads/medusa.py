"""Medusa heads: the d-th token to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

There is no context and no cache, and a step costs one matrix product: this is the cheapest trained drafter. The heads
return guidance-combined features, which the target's head maps to distributions.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from lantern.core.types import DraftTree
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads.marginals import MarginalDrafter
from lantern.drafters.heads.residual import ResidualConfig, ResidualHeads


@dataclass(frozen=True)
class MedusaConfig(ResidualConfig):
    """Sizes of the heads."""

    kind: Literal["medusa"] = "medusa"


class Medusa(ResidualHeads):
    """The heads."""

    config: MedusaConfig

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return the heads' predictions at every token."""
        guided, tokens = examples.guided, examples.tokens
        scales = examples.scales[:, None].expand(tokens.shape)
        predicted, count = self(guided, tokens, scales), tokens.shape[1]
        return [
            Prediction(depth, torch.arange(depth, count, device=tokens.device), predicted[:, :-depth, depth - 1])
            for depth in range(1, min(depths, self.config.depths, count - 1) + 1)
        ]


class MedusaDrafter(MarginalDrafter):
    """Drafts trees from the heads' independent guesses."""

    def propose(self) -> DraftTree:
        """Run the heads and the target's head over `depth` features, and return the tree."""
        last = self.pairs
        scales = self.sampling.scales(last.places.gather(1, last.last))
        predicted = self.module(last.last_features(), last.root, scales)[:, 0, : self.depth]
        return self.draft(predicted)
