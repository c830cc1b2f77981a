"""8-bit weights of torchao, which must be installed, and inputs for them."""

from typing import Any

import torch
from torch import Tensor, nn

from lantern.core.prepared import quantized
from lantern.engines.cpu.kernels import Arena


def in_eight_bits(weight: Tensor) -> nn.Linear:
    """Return a linear with the weight quantized by torchao."""
    layers = nn.Module()
    layers.fc = nn.Linear(weight.shape[1], len(weight), bias=False)
    layers.fc.weight = nn.Parameter(weight)
    made = quantized(layers, "int8", ("fc",)).fc
    assert isinstance(made, nn.Linear)
    return made


def weights(outputs: int, inputs: int) -> tuple[Any, Tensor]:
    """Return weights of torchao, and the same packed; outputs differ in size, so that mixed-up scales are detected."""
    random = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    weight: Any = in_eight_bits((random * torch.logspace(-3, 3, outputs)[:, None]).bfloat16()).weight
    assert weight.qdata.min() < -100 and weight.qdata.max() > 100
    return weight, Arena(8 * random.numel() + 4096).panels(weight)


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2)) * torch.arange(1, count + 1)[:, None]
