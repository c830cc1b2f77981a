"""Weights in 8 bits: the integers, scales and products of torchao, without its import."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from lantern.core.config import Weights
from lantern.core.weights import Int8Weight, quantize
from tests.refusals import refused
from tests.tiny import needs_torchao

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear_of(dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    """Return a linear with more outputs than are quantized at once, one of them of zeros."""
    torch.manual_seed(0)
    made = nn.Linear(96, 1500, bias=bias).to(dtype).requires_grad_(False)
    made.weight[7] = 0
    return made


def in_eight_bits(linear: nn.Linear) -> nn.Linear:
    made = copy.deepcopy(linear)
    quantize("fc", made, "int8")
    return made


@needs_torchao
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_scales_and_products_are_those_of_torchao(dtype: torch.dtype, bias: bool) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = linear_of(dtype, bias=bias)
    expected = copy.deepcopy(linear)
    quantize_(expected, Int8WeightOnlyConfig())
    found = in_eight_bits(linear)
    ours, theirs = found.weight, expected.weight
    assert isinstance(ours, Int8Weight) and isinstance(ours, nn.Parameter) and ours.dtype == dtype
    assert torch.equal(ours.qdata, theirs.qdata) and torch.equal(ours.scale, theirs.scale)  # type: ignore[attr-defined]
    numbers, some = torch.tensor([3, 7, 1499, 3]), torch.randn(2, 5, 96).to(dtype)
    for x in (some, some[0], some[0, 0], some[:, :0]):
        assert torch.equal(found(x), expected(x))
        for rows in (slice(700, None), numbers):
            assert torch.equal(F.linear(x, ours[rows].contiguous()), F.linear(x, theirs[rows].contiguous()))


@pytest.mark.parametrize(
    "changed", [copy.deepcopy, lambda linear: linear.to(torch.bfloat16), lambda linear: linear.half().float()]
)
def test_weights_in_8_bits_are_copied_and_moved_with_their_module(changed: Callable[[nn.Linear], nn.Linear]) -> None:
    linear = in_eight_bits(linear_of(torch.float32))
    assert isinstance(linear.weight, Int8Weight)
    before = linear.weight.qdata.clone()
    made = changed(copy.deepcopy(linear))
    assert isinstance(made.weight, Int8Weight) and isinstance(made.weight, nn.Parameter)
    assert torch.equal(made.weight.qdata, before) and made.weight.scale.dtype == torch.float32
    assert made.weight.qdata is not linear.weight.qdata
    assert made(torch.ones(1, 96, dtype=made.weight.dtype)).dtype == made.weight.dtype
    assert repr(made.weight) == f"Int8Weight([1500, 96], {made.weight.dtype}, cpu)"


def test_other_operations_on_weights_in_8_bits_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="not defined for weights in 8 bits"):
        in_eight_bits(linear_of(torch.float32)).weight.sum()


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=needs_torchao)])
def test_a_weight_that_is_parametrized_or_quantized_already_is_not_quantized(weights: Weights) -> None:
    linear = linear_of(torch.float32)
    again = f"the weight of fc is quantized already, {weights} was given"
    refused(quantize, "fc", in_eight_bits(linear), weights, match=again)
    register_parametrization(linear, "weight", nn.Tanh())
    refused(quantize, "fc", linear, weights, match="the weight of fc is parametrized")
