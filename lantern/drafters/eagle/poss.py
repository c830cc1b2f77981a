"""PosS: position specialists, one layer for each depth of drafting or for each few depths (arXiv:2506.03566).

EAGLE's single layer must handle true features and features that it drafted itself, which get worse with every depth.
Here draft number i is made by specialist i // n ("PosS-n"), trained on features as inaccurate as in drafting. All
specialists read the true features of committed tokens, so each has its own keys and values: a pass runs the specialist
of its depth and computes only keys and values for the later ones.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.drafters.eagle.eagle1 import MAX_LAYERS, Eagle, EagleConfig, EagleLayer
from lantern.models.llamagen.transformer import rotate


@dataclass(frozen=True)
class PossConfig(EagleConfig):
    """Sizes of a PosS-n drafter: specialists for `depths` depths, n = `per_layer` each; the last covers the rest.

    ValueError for a value out of range.
    """

    kind: str = "poss"
    depths: int = 6
    per_layer: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.depths <= MAX_LAYERS or self.per_layer < 1:
            raise ValueError(f"depths {self.depths}, per_layer {self.per_layer}: wanted 1 to {MAX_LAYERS}, and above 0")
        if self.layers != 1:
            raise ValueError(f"layers is {self.layers}, wanted 1: a specialist is one decoder layer")

    @property
    def specialists(self) -> int:
        """Number of specialists."""
        return -(-self.depths // self.per_layer)


class Specialist(EagleLayer):
    """A decoder layer with its own projection of pairs."""

    is_packable = False

    def __init__(self, config: PossConfig, number: int) -> None:
        super().__init__(config, number)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=config.has_fc_bias)

    def write_keys(
        self, x: Float[Tensor, "b n c"], factors: Float[Tensor, "b n 3 1 half 2"], cache: Any, slots: Int[Tensor, "b n"]
    ) -> None:
        """Write keys and values for later passes, and compute nothing else."""
        attention = self.attention
        fresh = F.linear(x, attention.wqkv.weight[x.shape[-1] :]).unflatten(-1, (2, attention.n_head, -1))
        cache.write(self.number, slots, rotate(fresh, factors[:, :, 1:]))


class Poss(Eagle):
    """The specialists; embeddings and the encoding of guidance are shared. The head is the target's."""

    config: PossConfig

    def __init__(self, config: PossConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Specialist(config, i) for i in range(config.specialists))
        del self.fc

    @property
    def projections(self) -> list[nn.Linear]:
        """The projection of each specialist."""
        return [specialist.fc for specialist in self.layers]

    @property
    def least_depths(self) -> int:
        """Least number of depths in training that includes drafts of every specialist."""
        return (len(self.layers) - 1) * self.config.per_layer + 1

    def specialist_at(self, depth: int) -> int:
        """Return the number of the specialist for a pass after `depth` drafted features."""
        return min(depth // self.config.per_layer, len(self.layers) - 1)

    def run_layers(
        self,
        features: Float[Tensor, "b n c"],
        tokens: Int[Tensor, "b n"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        scales: Float[Tensor, "b n"] | None,
        depth: int,
        **attention: Any,
    ) -> Float[Tensor, "b n c"]:
        """Return the next features by the specialist of this depth; the later ones write keys and values only."""
        pairs = self.pair(features, tokens)
        own, *later = self.layers[self.specialist_at(depth) :]
        if attention["cache"] is not None:
            for specialist in later:
                inputs = self.add_scale(specialist.fc(pairs), scales)
                specialist.write_keys(inputs, factors, attention["cache"], attention["slots"])
        return own(self.add_scale(own.fc(pairs), scales), factors, **attention)

    def feed_back(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the outputs without gradients: a specialist is trained on the earlier ones' outputs as they are."""
        return features.detach()
