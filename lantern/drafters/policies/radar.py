"""RADAR: a small recurrent network decides after each draft pass whether to run another (trained by REINFORCE)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lantern.drafters.policies.policy import (
    MIN_LOG,
    Layer,
    Limits,
    Policy,
    State,
    check_share,
    padded_beam,
)

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
        self, beam: Float[Tensor, "b w"], side: Float[Tensor, "b 4"], memory: State
    ) -> tuple[Float[Tensor, " b"], State]:
        """Return the logit of drafting below a beam of log probabilities, and the new memory."""
        seen = torch.cat([beam.clamp(min=MIN_LOG) / 10, side], 1).to(self.second.weight.dtype)
        hidden, kept = self.cell(seen, memory)
        continue_logit = self.second(torch.relu(self.first(torch.cat([hidden, seen], 1))))[:, 0]
        return continue_logit.float(), (hidden, kept)


def side_inputs(depth: int, near: Float[Tensor, "b 3"]) -> Float[Tensor, "b 4"]:
    """Return the network's inputs besides the beam."""
    return torch.cat([torch.full_like(near[:, :1], depth / 8), near], 1)


@dataclass(frozen=True)
class RadarPolicy(Policy):
    """EAGLE-2's tree by probabilities to match, as deep as the network continues; the first depth is always drafted.

    It stops where the probability of stopping is above `threshold`; only training samples the decision.
    ValueError for a threshold outside (0, 1).
    """

    part: Radar
    threshold: float = 0.5
    reads_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)

    def begin(self, size: Limits) -> State:
        """Return the network's memory, and whether it has stopped."""
        kind = self.part.second.weight.dtype
        memory = torch.zeros(size.images, self.part.config.hidden, dtype=kind, device=size.device)
        return memory, memory.clone(), torch.zeros(size.images, dtype=torch.bool, device=size.device)

    def plan(self, state: State) -> State:
        """Return the reset state: every step starts from zero."""
        hidden, kept, is_over = (torch.zeros_like(x) for x in state)
        return hidden, kept, is_over

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, -inf below a beam after which the network stopped."""
        assert layer.match is not None
        if layer.depth == 0:
            return layer.match, state
        beam = padded_beam(layer.joint, self.part.config.beam)
        continue_logit, (hidden, kept) = self.part(beam, side_inputs(layer.depth, layer.near), state[:2])
        is_over = state[2] | (torch.sigmoid(-continue_logit) > self.threshold)
        return layer.match.masked_fill(is_over[:, None, None], -torch.inf), (hidden, kept, is_over)
