"""Medusa heads: the d-th code to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

There is no context and no cache, and a step costs one matrix product: this is the cheapest trained drafter. The heads
return guidance-combined features, which the target's head maps to distributions.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from lantern.core.types import DraftTree
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads.marginals import MarginalDrafter, common_arguments
from lantern.drafters.heads.residual import ResidualConfig, ResidualHeads
from lantern.methods.spec import AddOn, DrafterContext, Method, MethodSpec
from lantern.verifiers.relaxations.tolerance import SAMPLES, Tolerance
from lantern.verifiers.relaxations.typical import TYPICAL, Typical


@dataclass(frozen=True)
class MedusaConfig(ResidualConfig):
    """Sizes of the heads."""

    kind: Literal["medusa"] = "medusa"


class Medusa(ResidualHeads):
    """The heads."""

    config: MedusaConfig

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return the heads' predictions at every code."""
        guided, codes = examples.guided, examples.codes
        scales = examples.scales[:, None].expand(codes.shape)
        predicted, count = self(guided, codes, scales), codes.shape[1]
        return [
            Prediction(depth, torch.arange(depth, count, device=codes.device), predicted[:, :-depth, depth - 1])
            for depth in range(1, min(depths, self.config.depths, count - 1) + 1)
        ]


class MedusaDrafter(MarginalDrafter):
    """Drafts trees from the heads' independent guesses."""

    def propose(self) -> DraftTree:
        """Run the heads and the target's head over `depth` features, and return the tree."""
        last = self._pairs
        scales = self.sampling.scales(last.places.gather(1, last.last))
        predicted = self.module(last.last_features(), last.root, scales)[:, 0, : self.depth]
        return self.marginals.draft(last.root, predicted, last.known)


def build(method: Method, context: DrafterContext) -> MedusaDrafter:
    """Build static trees drafted by the model's Medusa heads."""
    return MedusaDrafter(context.add_on(method), context.target, **common_arguments(method, context))


MEDUSA = AddOn("medusa", Medusa, MedusaConfig, training_config="drafter-medusa", toy={"depths": 12}, limits_depth=True)
SPEC = MethodSpec(
    "medusa",
    "Medusa heads: codes ahead are guessed from the last feature alone; exact by Gumbel match",
    "heads",
    drafter=build,
    tree="grown_8_2",
    add_ons=(MEDUSA,),
    paper="2401.10774",
)
METHODS = (
    SPEC,
    SPEC.preset(
        "medusa-paper",
        "relaxed: Medusa as published: a tree of 63 nodes, typical acceptance",
        tree="grown_63_4",
        mode="point",
        verifier="rejection",
        relaxation=Typical,
        settings=TYPICAL,
    ),
    MethodSpec(
        "vadusa",
        "relaxed: VADUSA (reconstructed): Medusa heads draft; accepted if among several samples of the target",
        "heads",
        drafter=build,
        tree="grown_8_2",
        mode="point",
        verifier="rejection",
        relaxation=Tolerance,
        settings=(SAMPLES,),
        add_ons=(MEDUSA,),
        paper="2410.21951",
    ),
)
