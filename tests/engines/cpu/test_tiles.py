"""Products by AMX: correct, with the same bits for any number of rows, and without effect on torch's own."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern.engines.cpu.build import find_compiler, has_amx
from lantern.engines.cpu.kernels import Arena, linear

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

PROCESSOR = Path("/proc/cpuinfo")
HAS_UNITS = PROCESSOR.is_file() and "amx_bf16" in PROCESSOR.read_text()


def weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A weight in bf16, and the same packed."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    return weight, Arena(weight.numel() * 2 + 64).panels(weight)


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2))


@pytest.mark.skipif(not HAS_UNITS, reason="this processor has no AMX for bf16 (AMX)")
def test_amx_is_used_if_available() -> None:
    known = subprocess.run(
        [find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True
    ).stdout
    assert has_amx() == ("__AMX_BF16__" in known)


@pytest.mark.skipif(HAS_UNITS or not PROCESSOR.is_file(), reason="this processor has AMX, or its features are unknown")
def test_amx_is_not_used_if_unavailable() -> None:
    assert not has_amx()


# 48 is no multiple of the inputs of an instruction
@pytest.mark.parametrize("inputs", [32, 48, 192])
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 50, 97])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(count: int, inputs: int) -> None:
    weight, packed = weights(96, inputs)
    x = rows(count, inputs)
    found = linear(x, packed, None, 96)
    assert torch.equal(found, torch.cat([linear(row, packed, None, 96) for row in x.split(1)]))
    expected = x.bfloat16().double() @ weight.double().T
    bound = x.bfloat16().double().abs() @ weight.double().abs().T * inputs * 2**-23
    assert (found - expected).abs().le(bound).all()


def test_tile_configuration_of_torch_is_restored() -> None:
    weight, packed = weights(96, 192)
    x = rows(40, 192).bfloat16()
    before = x @ weight.T
    for count in (1, 7, 16, 33):
        linear(rows(count, 192), packed, None, 96)
        assert torch.equal(x @ weight.T, before)
