"""Products in C++: right within rounding, and with the same bits for any number of rows and by any instructions."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lantern.engines.cpu import build as building
from lantern.engines.cpu.build import find_compiler, has_amx
from lantern.engines.cpu.structures import cpp
from lantern.engines.cpu.target import Arena, linear
from tests.core.test_weights import in_eight_bits

PROCESSOR = Path("/proc/cpuinfo")
HAS_UNITS = PROCESSOR.is_file() and "amx_bf16" in PROCESSOR.read_text()
KINDS = ["fp32", "bf16", "int8"]


def weights(kind: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return weights in fp64, and the same packed; outputs differ in size, so that mixed-up scales are detected."""
    random = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    weight = random * torch.logspace(-3, 3, outputs)[:, None]
    weight = weight if kind == "fp32" else weight.bfloat16()
    arena = Arena(8 * random.numel() + 4096)
    if kind != "int8":
        return weight.double(), arena.panels(weight)
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(weight)
    made: Any = in_eight_bits(linear).weight
    return made.qdata.double() * made.scale.double(), arena.panels(made)


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2)) * torch.arange(1, count + 1)[:, None]


def in_steps(x: Tensor) -> Tensor:
    """Return the inputs of int8 products: each row is rounded to 127 steps."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 100),
    inputs=st.integers(1, 12).map(lambda n: 16 * n),  # many are no multiple of the inputs of an instruction
    outputs=st.integers(1, 3).map(lambda n: 32 * n),
    has_bias=st.booleans(),
    is_half=st.booleans(),
)
def test_a_product_is_right_and_the_bits_of_a_row_do_not_depend_on_other_rows(
    kind: str, count: int, inputs: int, outputs: int, has_bias: bool, is_half: bool
) -> None:
    weight, packed = weights(kind, outputs, inputs)
    x, bias = rows(count, inputs), torch.linspace(-1, 1, outputs) if has_bias else None
    x = x.bfloat16() if is_half else x
    found = linear(x, packed, bias, outputs)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.cat([linear(row, packed, bias, outputs) for row in x.split(1)]))
    exact = x.double() if kind != "bf16" else x.bfloat16().double()
    added = torch.zeros(outputs) if bias is None else bias.double()
    error, sizes = (found - (exact @ weight.T + added)).abs(), exact.abs() @ weight.abs().T + added.abs()
    if kind == "int8":  # inputs are rounded to 127 steps either way, their sums to fp32
        steps, largest = exact.abs().amax(1, keepdim=True) / 127, float(sizes.max() if count else 0)
        assert error.le(0.501 * steps * weight.abs().sum(1) + 2**-20 * sizes).all()
        if not is_half:  # numbers with few bits are often halfway between two steps
            expected = in_steps(exact) @ weight.T + added
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * largest)
    else:
        assert error.le(sizes * inputs * 2**-23).all()
        assert not count or error.max() <= 1e-5 * found.abs().max()


@pytest.mark.skipif(has_amx(), reason="AMX adds products in another order")
def test_products_in_bf16_are_added_in_the_same_order_by_all_vector_lanes() -> None:
    (weight, packed), x = weights("bf16", 64, 192), rows(3, 192)
    sums = torch.zeros(3, 64)
    for k in torch.arange(192).unflatten(0, (-1, 2)).flip(1).flatten().tolist():  # the odd input of a pair is first
        sums = (sums + x.bfloat16().double()[:, k, None] * weight[:, k]).float()  # rounded once, as fused products are
    assert torch.equal(linear(x, packed, None, 64), sums)


def test_nonfinite_inputs_of_8_bit_products_give_nan_and_zeros_give_zero() -> None:
    _, packed = weights("int8", 64, 64)
    for off in (torch.nan, torch.inf, -torch.inf):
        x = rows(3, 64)
        x[1, 17] = off
        assert linear(x, packed, None, 64).isfinite().all(1).tolist() == [True, False, True]
    assert not linear(torch.zeros(3, 64), packed, None, 64).any()


def test_amx_is_used_if_the_processor_and_the_compiler_have_it() -> None:
    command = [find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    known = subprocess.run(command, capture_output=True, text=True).stdout
    assert has_amx() == (HAS_UNITS and "__AMX_BF16__" in known)


@pytest.mark.skipif(not HAS_UNITS, reason="this processor has no AMX")
def test_vector_lanes_and_amx_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, packed), x = weights("int8", 96, 192), rows(23, 192)
    expected = linear(x, packed, None, 96)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "PACKAGED", tmp_path)
    monkeypatch.setattr(building, "features", lambda: building.V4_BF16.features)
    monkeypatch.setattr(building, "FLAGS", ("-O1", *building.FLAGS[1:]))
    building.library.cache_clear()
    try:
        assert not building.has_amx()
        assert torch.equal(linear(x, packed, None, 96), expected)
    finally:
        building.library.cache_clear()


def test_tile_configuration_of_torch_is_restored() -> None:
    _, packed = weights("bf16", 96, 192)
    x, weight = rows(40, 192).bfloat16(), torch.ones(96, 192).bfloat16()
    before = x @ weight.T
    for count in (1, 7, 16, 33):
        linear(rows(count, 192), packed, None, 96)
        assert torch.equal(x @ weight.T, before)


def test_arguments_have_the_fields_that_cpp_declares() -> None:
    with pytest.raises(KeyError, match="weight"):
        cpp.LinearArgs(rows=1, weight=None)
