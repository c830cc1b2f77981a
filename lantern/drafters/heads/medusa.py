"""Medusa heads: the d-th code to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

There is no context and no cache, and a step costs one matrix product: this is the cheapest trained drafter. The heads
return guidance-combined features, which the target's head turns into distributions.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Sampling
from lantern.core.types import DrafterDefaults, DraftMode, DraftTree, NoiseSource, Prefill, Step, Target
from lantern.drafters.base import Chooser
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads.marginals import Marginals, check_fit
from lantern.drafters.heads.pairs import Pairs
from lantern.drafters.heads.residual import FeatureHeads
from lantern.drafters.trees.static import StaticTree, named
from lantern.methods.spec import AddOn, DrafterContext, Method, MethodSpec
from lantern.models.llamagen.transformer import TransformerConfig, check_limits
from lantern.verifiers.relaxations.tolerance import SAMPLES, Tolerance

MAX_DEPTHS = 64


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of `depths` Medusa heads. With `reads_code` they read the last code as well as the feature before it.

    `target` is the digest of the weights for which they were trained, None if unknown.
    """

    dim: int
    vocab_size: int
    block_size: int
    depths: int = 4
    reads_code: bool = True
    kind: Literal["medusa"] = "medusa"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}")
        check_limits(self, "dim", "vocab_size", "block_size")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> "MedusaConfig":
        """Return a config with its target's width."""
        fields: dict[str, Any] = {"dim": config.dim, "vocab_size": config.vocab_size, "block_size": config.block_size}
        return cls(**(fields | changes))


class Medusa(nn.Module):
    """The heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = FeatureHeads(
            config.dim, config.depths, vocab_size=config.vocab_size if config.reads_code else None
        )

    @property
    def reads(self) -> frozenset[str]:
        """Return no extras: F* is enough."""
        return frozenset()

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Start every head at "the next feature equals this one"."""
        self.heads.init_weights(target.tok_embeddings.weight.data)

    def forward(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"]
    ) -> Float[Tensor, "b n d c"]:
        """Estimate the features that predict codes j + 1 .. j + depths from the one that predicted code j."""
        return self.heads(features, tokens, scales)

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return the heads' predictions at every code."""
        guided, codes = examples.guided, examples.codes
        scales = examples.scales[:, None].expand(codes.shape)
        predicted, count = self(guided, codes, scales), codes.shape[1]
        return [
            Prediction(depth, torch.arange(depth, count, device=codes.device), predicted[:, :-depth, depth - 1])
            for depth in range(1, min(depths, self.config.depths, count - 1) + 1)
        ]


class MedusaDrafter(DrafterDefaults):
    """Drafts trees from the heads' independent guesses."""

    needs_whole_prefix = False
    draft_passes = 1  # one pass covers all depths

    def __init__(
        self,
        module: Medusa,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        check_fit(module.config, target, tree)
        self.module, self.sampling = module, sampling
        self.mode: DraftMode = mode
        self.marginals = Marginals(tree, mode=mode, sampling=sampling, target=target, records_log_q=records_log_q)
        self.records_log_q = self.marginals.records_log_q
        self.max_nodes, self.depth = tree.max_nodes, tree.depth

    def weave(self, chooser: Chooser, most_committed: int) -> None:
        """Let `chooser` choose the children, in trees from which a step may commit up to `most_committed` codes."""
        self.marginals.chooser = chooser

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Start from the prompt's last feature and code 0."""
        self.marginals.begin(noise, prefill.first.device)
        self._pairs = Pairs.of_prompt(prefill, self.sampling)

    def observe(self, step: Step) -> None:
        """Keep the committed codes with their features."""
        self._pairs = Pairs.of_step(step, self.sampling, self.module.config.block_size)

    def propose(self) -> DraftTree:
        """Run the heads and the target's head over `depth` features, and return the tree."""
        last = self._pairs
        scales = self.sampling.scales(last.places.gather(1, last.last))
        predicted = self.module(last.last_features(), last.root, scales)[:, 0, : self.depth]
        return self.marginals.draft(last.root, predicted, last.known)


def build(method: Method, context: DrafterContext) -> MedusaDrafter:
    """Build static trees drafted by the model's Medusa heads."""
    module = context.add_on(method)
    assert isinstance(module, Medusa) and method.tree is not None
    return MedusaDrafter(
        module,
        context.target,
        tree=named(method.tree),
        mode=context.mode(method),
        sampling=context.sampling,
        records_log_q=context.records_log_q(method),
    )


MEDUSA = AddOn("medusa", Medusa, MedusaConfig, training_config="drafter-medusa", toy={"depths": 12})
METHODS = (
    MethodSpec(
        "medusa",
        "Medusa heads: codes ahead are guessed from the last feature alone; exact by Gumbel match",
        "heads",
        drafter=build,
        tree="grown_8_2",
        add_ons=(MEDUSA,),
        weavable=True,
        paper="2401.10774",
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
