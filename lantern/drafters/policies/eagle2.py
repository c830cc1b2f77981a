"""EAGLE-2: the nodes in which the drafter has the highest confidence (arXiv:2406.16858)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from lantern.drafters.policies.policy import Layer, Policy
from lantern.drafters.trees.static import RATES

VALUES = ("q", "match")


@dataclass
class Eagle2(Policy):
    """The value of a node is the product of q along its path; the candidates of highest value are verified.

    With `value` "match" the product is of the probabilities to be the target's own sample, estimated from scores
    log q + noise. This is the confidence where tokens are sampled with the target's noise; without noise both give the
    same order. ValueError for another value.
    """

    value: str = "q"
    saves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.value not in VALUES:
            raise ValueError(f'value is "{self.value}", wanted one of {", ".join(VALUES)}')

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log q of the candidates, or their log probability to match."""
        chosen = layer.log_q if self.value == "q" else layer.match
        assert chosen is not None
        return chosen


@dataclass
class PredictableEagle2(Eagle2):
    """EAGLE-2 for rejection: the number of children of a node is chosen before they are sampled.

    Dropping sampled nodes by their own probability would bias the result. A parent's confidence is therefore the sum of
    squares of its distribution (the mean of q over its samples), assigned to the first child; the rest is divided by
    rank, by the rates of an average drafter.
    """

    is_predictable: ClassVar[bool] = True

    def begin(self, images: int, device: torch.device) -> None:
        """Keep the rates of the ranks."""
        self.held.rates = torch.tensor(RATES, dtype=torch.float32, device=device)

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities by rank, from the parent's distribution alone."""
        sure = layer.collision[..., None]
        first, rates = pad(sure, (0, layer.width - 1)), pad(self.held.rates, (0, layer.width))[: layer.width]
        return (first + (1 - sure) * rates).log()
