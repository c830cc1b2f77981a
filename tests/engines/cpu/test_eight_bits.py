"""Fused passes over 8-bit weights: equal to dequantized weights, with the same bits whatever is scored with a token."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from lantern.core.prepared import quantized
from lantern.drafters.base import target_logits
from lantern.engines.cpu import build as building
from lantern.engines.cpu import compiler as compiling
from lantern.engines.cpu.drafter import packed_drafter
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cpu.kernels import linear
from lantern.models.llamagen.transformer import Transformer
from tests.engines.cpu.bytewise import rows, weights
from tests.engines.cpu.test_target import TOKENS, TREE, Passes, check_bits, target_in, twin_of
from tests.engines.cpu.test_tiles import HAS_UNITS
from tests.tiny import tiny_eagle

torchao = pytest.importorskip("torchao", reason="torchao is not installed: extra eval or dev")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")


def full(target: Transformer) -> Transformer:
    """Return the target with dequantized weights, in fp32, whose linears round each row of inputs to 127 steps."""
    wide = copy.deepcopy(target)
    for module in wide.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            module.weight = nn.Parameter(module.weight.qdata.float() * module.weight.scale)  # type: ignore[operator]
            module.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return wide.float()


def in_steps(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("inputs", [16, 64, 96, 192])  # some are no multiple of the inputs of an instruction
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 15, 16, 17, 33, 50])
def test_product_is_correct_and_does_not_depend_on_other_rows(count: int, inputs: int) -> None:
    weight, packed = weights(96, inputs)
    x = rows(count, inputs)
    found = linear(x, packed, None, 96)
    assert torch.equal(found, torch.cat([linear(row, packed, None, 96) for row in x.split(1)]))
    wide = weight.qdata.double() * weight.scale.double()
    required, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    # inputs are rounded to 127 steps either way, their sums to fp32
    steps = x.double().abs().amax(1, keepdim=True) / 127
    bound = 0.501 * steps * wide.abs().sum(1) + 2**-20 * sizes
    assert (found - required).abs().le(bound).all()
    torch.testing.assert_close(
        found.double(), in_steps(x.double()) @ wide.T, rtol=1e-5, atol=1e-5 * float(sizes.max() if count else 0)
    )


def test_nonfinite_inputs_give_nan() -> None:
    _, packed = weights(64, 64)
    for off in (torch.nan, torch.inf, -torch.inf):
        x = rows(3, 64)
        x[1, 17] = off
        assert linear(x, packed, None, 64).isfinite().all(1).tolist() == [True, False, True]


def test_zero_inputs_give_zero() -> None:
    _, packed = weights(64, 64)
    assert not linear(torch.zeros(3, 64), packed, None, 64).any()


@pytest.mark.skipif(not HAS_UNITS, reason="this processor has no AMX")
def test_vector_lanes_and_amx_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, packed), x = weights(96, 192), rows(23, 192)
    expected = linear(x, packed, None, 96)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "PACKAGED", tmp_path)
    monkeypatch.setattr(compiling, "features", lambda: compiling.V4_BF16.features)
    monkeypatch.setattr(compiling, "FLAGS", ("-O1", *compiling.FLAGS[1:]))
    building.library.cache_clear()
    try:
        assert not building.has_amx()
        assert torch.equal(linear(x, packed, None, 96), expected)
    finally:
        building.library.cache_clear()


@pytest.mark.parametrize("dim", [64, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_equal_dequantized_weights(dim: int, dtype: torch.dtype) -> None:
    target = quantized(target_in(dtype, dim=dim), "int8")
    assert isinstance(target, Transformer)
    expected, found = (Passes(t).score(TOKENS, TREE).logits for t in (full(target), twin_of(target)))
    unrounded = Passes(target_in(dtype, dim=dim)).score(TOKENS, TREE).logits
    # where sums in another order round no input to another step, logits are equal; elsewhere they are close
    apart = (found - expected).abs()
    assert float(apart.amax((0, -1)).min()) < 1e-4
    assert float(apart.mean()) < 0.5 * float((unrounded - expected).abs().mean())


@pytest.mark.parametrize("dim", [64, 160])
def test_logits_are_the_same_bits_alone_in_a_tree_and_in_a_batch(dim: int) -> None:
    check_bits(twin_of(quantized(target_in(torch.bfloat16, dim=dim), "int8")))  # type: ignore[arg-type]


def test_fused_8_bit_drafters_are_close_to_full_ones() -> None:
    target = target_in(torch.bfloat16)
    module = tiny_eagle(target).bfloat16()
    features = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(9)[None]
    fused = twin_of(target)
    with torch.no_grad():
        whole, narrow = (
            target_logits(fused, made.training_forward(features, tokens)).log_softmax(-1)
            for made in (packed_drafter(module), packed_drafter(module, int8=True))
        )
    assert 0 < float((narrow - whole).abs().max()) <= 0.1 * float(whole.std())
    assert packed_drafter(module, int8=True) is packed_drafter(module, int8=True) is not packed_drafter(module)


def test_mixed_weights_are_refused() -> None:
    target = quantized(target_in(torch.bfloat16), "int8")
    target.output = nn.Linear(64, 32, bias=False).bfloat16()
    with pytest.raises(ValueError, match="all weights in 8 bits or none, this model has both"):
        CpuEngine().prepare(target)  # type: ignore[arg-type]
