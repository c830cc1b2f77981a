"""Training examples and predictions: the interface between a drafter's module and its training."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

EXTRAS = ("prompt", "layers")


def fused_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of a target whose inputs EAGLE-3 reads: 2, L/2 and L - 3 (arXiv:2503.01840)."""
    return min(2, count - 1), count // 2, max(count - 3, 0)


@dataclass(frozen=True)
class Examples:
    """Tokens of images that the target made, with its features. Entry i of a feature axis predicts token i.

    `rows` are features after the final norm, conditional and unconditional; `scales` is the guidance of each image.
    `words` and `mask` are its caption's features, padded on the left. Only for modules whose `reads` names them:
    `prompt`, features of the caption's slots before the one that predicts token 0; `layers`, the inputs of the layers
    that `fused_layers` names.
    """

    tokens: Int[Tensor, "b n"]
    rows: Float[Tensor, "b 2 n c"]
    scales: Float[Tensor, " b"]
    words: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | None = None
    prompt: Float[Tensor, "b 2 s c"] | None = None
    layers: Float[Tensor, "b 2 3 n c"] | None = None

    @property
    def guided(self) -> Float[Tensor, "b n c"]:
        """Return F* = f_u + s (f_c - f_u), the features whose head logits are the guided logits."""
        return self.guide(self.rows)

    def guide(self, rows: Float[Tensor, "b 2 *rest"]) -> Float[Tensor, " b *rest"]:
        """Combine the two rows of a tensor by each image's guidance."""
        scales = self.scales.view(-1, *[1] * (rows.ndim - 2))
        return rows[:, 1] + scales * (rows[:, 0] - rows[:, 1])

    def to(self, device: torch.device) -> "Examples":
        """Return the same on a device."""
        here = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in here.items() if x is not None})


@dataclass(frozen=True)
class Prediction:
    """Predictions at one depth: entry j is for token `places[j]`, drafted `depth` tokens past the known ones.

    Depth 1 is the first draft. Set one of: `features`, estimates of F*, which the target's head maps to logits;
    `rows`, the same for both guidance rows; `logits` of the module's own head, -inf for tokens that it never drafts
    (with `features` as well if they are regressed too).
    """

    depth: int
    places: Int[Tensor, " m"]
    features: Float[Tensor, "b m c"] | None = None
    rows: Float[Tensor, "b 2 m c"] | None = None
    logits: Float[Tensor, "b m v"] | None = None


class Trainee(nn.Module, ABC):
    """A module that `lantern train drafter` trains.

    Its config is a frozen dataclass with the fields `kind` and `target` and a classmethod `for_target(target_config,
    **changes)`.
    """

    config: Any

    @property
    def reads(self) -> frozenset[str]:
        """The names out of EXTRAS that it needs in `Examples`."""
        return frozenset()

    @property
    def least_depths(self) -> int:
        """The least number of depths in training that trains all of the module."""
        return 1

    @abstractmethod
    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Set the weights from which training starts, for this target."""

    @abstractmethod
    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return its drafts at depths 1 .. `depths` from true tokens, with gradients; inputs are as in drafting."""
