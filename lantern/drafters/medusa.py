"""Medusa heads: the d-th code to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

No context, no cache and one matrix product a step: the cheapest trained drafter there is. The heads give features,
guidance-combined, which the target's own head turns into laws.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.drafters.chooser import Chooser
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads import FeatureHeads
from lantern.drafters.marginals import Marginals, check_fit
from lantern.drafters.pairs import Pairs
from lantern.methods import Kit, Method
from lantern.models.llamagen.transformer import TransformerConfig
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, named
from lantern.types import DraftMode, DraftTree, NoiseSource, Prefill, Step, Target

MAX_DEPTHS = 64


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of Medusa heads: `depths` of them. `reads_code`: they know the last code, not only what predicted it.

    `target` is the digest of the weights that they were trained for; None is unknown.
    """

    dim: int
    vocab_size: int
    block_size: int
    depths: int = 4
    reads_code: bool = True
    kind: str = "medusa"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> "MedusaConfig":
        """Heads of its target's width."""
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
        """F* is enough."""
        return frozenset()

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Every head begins as "the next feature is this one"."""
        self.heads.init_weights(target.tok_embeddings.weight.data)

    def forward(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"]
    ) -> Float[Tensor, "b n d c"]:
        """Estimates of the features that predict codes j + 1 .. j + depths, of those that predicted code j."""
        return self.heads(features, tokens, scales)

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """What the heads say at every code."""
        guided, codes = examples.guided, examples.codes
        scales = examples.scales[:, None].expand(codes.shape)
        said, count = self(guided, codes, scales), codes.shape[1]
        return [
            Prediction(depth, torch.arange(depth, count, device=codes.device), said[:, :-depth, depth - 1])
            for depth in range(1, min(depths, self.config.depths, count - 1) + 1)
        ]


class MedusaDrafter:
    """Drafts trees of the heads' independent guesses."""

    needs_whole_prefix = False
    draft_passes = 1  # for all depths of a tree

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
        """Lets another choose the children, in trees of which a step may commit this many codes."""
        self.marginals.chooser = chooser

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Takes the prompt's last feature with code 0."""
        self.marginals.begin(noise, prefill.first.device)
        self._pairs = Pairs.of_prompt(prefill, self.sampling)

    def observe(self, step: Step) -> None:
        """Takes in what was committed."""
        self._pairs = Pairs.of_step(step, self.sampling, self.module.config.block_size)

    def propose(self) -> DraftTree:
        """One matrix product, the target's head over `depth` features, and the tree."""
        last = self._pairs
        scales = self.sampling.scales(last.places.gather(1, last.last))
        said = self.module(last.last_features(), last.root, scales)[:, 0, : self.depth]
        return self.marginals.draft(last.root, said, last.known)


def build(method: Method, kit: Kit) -> MedusaDrafter:
    """Trees of the method's name, drafted by the model's Medusa heads."""
    module = kit.part(method)
    assert isinstance(module, Medusa) and method.tree is not None
    mode = "point" if kit.sampling.is_greedy and method.mode == "sampled" else method.mode
    records = method.relaxation is not None and mode == "gumbel" and not kit.sampling.is_greedy
    return MedusaDrafter(
        module, kit.target, tree=named(method.tree), mode=mode, sampling=kit.sampling, records_log_q=records
    )
