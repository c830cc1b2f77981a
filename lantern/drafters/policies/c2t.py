"""C2T: a small classifier predicts which drafted nodes are accepted (classifier-based tree construction)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.drafters.policies.policy import TRAITS, Layer, Policy, Pool, check_share, not_stopped, size_of, traits_of

# Traits are divided by these, so that all are of the order of 1.
SCALES = {"joint": 10.0, "match": 5.0, "log_q": 10.0, "entropy": 8.0, "gap": 5.0, "depth": 8.0, "rank": 8.0}


@dataclass(frozen=True)
class C2TConfig:
    """Sizes of a classifier: `hidden` units over the traits of a node. `target` is its target's digest.

    ValueError for a value out of range and for an unknown trait.
    """

    hidden: int = 32
    traits: tuple[str, ...] = TRAITS
    kind: Literal["c2t"] = "c2t"
    target: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", tuple(self.traits))
        if unknown := [name for name in self.traits if name not in TRAITS]:
            raise ValueError(f"trait {unknown[0]!r} is unknown, wanted some of {', '.join(TRAITS)}")
        if not 1 <= self.hidden <= 1024 or not self.traits:
            raise ValueError(
                f"hidden is {self.hidden} over {len(self.traits)} traits, wanted 1 to 1024 over at least one"
            )


class C2T(nn.Module):
    """Two layers from the traits of a node to the logit of its acceptance, given that its parent was reached.

    The paper (arXiv:2502.13652, equations 1 to 4) reads the joint probability of the path, the entropy of the parent's
    distribution and the depth, in 48 hidden units. Here there are 32 by default,
    and the node's rank among its siblings and the acceptance at the neighbours in the image are read as well.
    """

    scale: Tensor

    def __init__(self, config: C2TConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Linear(len(config.traits), config.hidden)
        self.second = nn.Linear(config.hidden, 1)
        self._columns = [TRAITS.index(name) for name in config.traits]
        scale = torch.tensor([SCALES.get(name, 1.0) for name in config.traits])
        self.register_buffer("scale", scale, persistent=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set Normal(0, 0.3) weights in the first layer, Normal(0, 0.1) in the second, zero biases."""
        for layer, width in ((self.first, 0.3), (self.second, 0.1)):
            layer.weight.data.normal_(0.0, width, generator=generator)
            layer.bias.data.zero_()

    def forward(self, traits: Float[Tensor, "*n t"]) -> Float[Tensor, "*n"]:
        """Return the logits of nodes with these traits, all of TRAITS."""
        own = torch.stack([traits[..., column] for column in self._columns], -1)
        weight = self.first.weight
        return self.second(torch.relu(self.first((own / self.scale).to(weight.dtype))))[..., 0].float()


@dataclass
class C2TPolicy(Policy):
    """Chooses nodes by the classifier's confidence along their path; those below `threshold` do not count in the size.

    Confidence is of a node given its parent, multiplied along the path, so it never rises with depth. Without `ranks`,
    as published (algorithm 1), a node's own confidence is compared with the threshold, and of each depth the best of
    those above it stay, as many as a layer is wide. ValueError for a threshold outside (0, 1).
    """

    part: C2T
    threshold: float = 0.03
    ranks: bool = True
    reads_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return the classifier's log confidence in each candidate."""
        chances = nn.functional.logsigmoid(self.part(traits_of(layer)))
        if self.ranks:
            return chances
        is_open = not_stopped(layer.reach)[..., None] & (chances >= math.log(self.threshold))
        chances = chances.masked_fill(~is_open, -torch.inf)
        flat = chances.flatten(1)
        least = flat.topk(min(layer.width, flat.shape[1]), dim=1).values[:, -1, None, None]
        return chances.masked_fill(chances < least, -torch.inf)

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the size of the nodes above the threshold."""
        if not self.ranks:
            return super().preferred_size(pool)
        return size_of(pool, pool.values >= math.log(self.threshold))
