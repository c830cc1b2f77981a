"""RADAR: a small recurrent network decides after each draft pass whether to run another (trained by REINFORCE)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lantern.drafters.policies.policy import MIN_LOG, Layer, StoppingPolicy, check_share, padded_beam

Memory = tuple[Tensor, Tensor]

SIDE_INPUTS = 4  # depth, and the acceptance at three neighbours


@dataclass(frozen=True)
class RadarConfig:
    """Sizes of the network, which reads the `beam` best log probabilities of a depth; `target` is a digest.

    ValueError for a value out of range.
    """

    beam: int = 8
    hidden: int = 64
    kind: Literal["radar"] = "radar"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam <= 64 or not 1 <= self.hidden <= 256:
            raise ValueError(f"beam {self.beam}, hidden {self.hidden}: wanted 1 to 64, and 1 to 256")


class Radar(nn.Module):
    """An LSTM over the depths of one draft, and two layers that return the logit of continuing."""

    def __init__(self, config: RadarConfig) -> None:
        super().__init__()
        self.config = config
        width = config.beam + SIDE_INPUTS
        self.cell = nn.LSTMCell(width, config.hidden)
        self.first = nn.Linear(config.hidden + width, config.hidden)
        self.second = nn.Linear(config.hidden, 1)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set Normal(0, 0.1) weights, zero biases, and an output bias of 1 towards continuing."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "bias_" in name:
                parameter.data.zero_()
            else:
                parameter.data.normal_(0.0, 0.1, generator=generator)
        self.second.bias.data.fill_(1.0)

    def forward(
        self, beam: Float[Tensor, "b w"], side: Float[Tensor, "b 4"], memory: Memory | None = None
    ) -> tuple[Float[Tensor, " b"], Memory]:
        """Return the logit of drafting below a beam of log probabilities, and the new memory (before: None)."""
        seen = torch.cat([beam.clamp(min=MIN_LOG) / 10, side], 1).to(self.second.weight.dtype)
        hidden, kept = self.cell(seen, memory)
        continue_logit = self.second(torch.relu(self.first(torch.cat([hidden, seen], 1))))[:, 0]
        return continue_logit.float(), (hidden, kept)


def side_inputs(depth: int, near: Float[Tensor, "b 3"]) -> Float[Tensor, "b 4"]:
    """Return the network's inputs besides the beam."""
    return torch.cat([torch.full_like(near[:, :1], depth / 8), near], 1)


@dataclass
class RadarPolicy(StoppingPolicy):
    """EAGLE-2's tree by probabilities to match, as deep as the network continues; the first depth is always drafted.

    It stops where the probability of stopping is above `threshold`; only training samples the decision.
    ValueError for a threshold outside (0, 1).
    """

    part: Radar
    threshold: float = 0.5
    reads_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below a beam after which the network stopped."""
        if layer.depth == 0:
            self._memory, self._is_over = None, torch.zeros_like(layer.places, dtype=torch.bool)
        else:
            beam = padded_beam(layer.joint, self.part.config.beam)
            continue_logit, self._memory = self.part(beam, side_inputs(layer.depth, layer.near), self._memory)
            self._is_over = self._is_over | (torch.sigmoid(-continue_logit) > self.threshold)
        return self._is_over[:, None, None]
