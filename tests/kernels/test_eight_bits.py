"""Fused passes over 8-bit weights: what torchao's weights say, and the same bits whatever is scored with a code."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lantern.catalog import METHODS, Engine, build
from lantern.decoding.quantized import quantized
from lantern.drafters.target_head import target_logits
from lantern.kernels import build as building
from lantern.kernels.drafter import fused_drafter
from lantern.kernels.fused import fuse_target
from lantern.kernels.linear import linear
from lantern.models.llamagen.transformer import Transformer
from lantern.sampling import Sampling
from tests.kernels.bytewise import rows, weights
from tests.kernels.test_fused import TREE, Passes, check_bits, target_in, twin_of
from tests.kernels.test_tiles import HAS_UNITS
from tests.tiny import tiny_condition, tiny_eagle
from tests.tiny_parts import tiny_parts

torchao = pytest.importorskip("torchao", reason="torchao is not installed: extra eval or dev")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
CODES = [3, 1, 4, 15, 9, 2, 6]
EXACT = [name for name, method in METHODS.items() if method.exact and method.verifier == "gumbel" and method.drafter]


def full(target: Transformer) -> Transformer:
    """The target that 8-bit weights say, in fp32."""
    wide = copy.deepcopy(target)
    for module in wide.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            module.weight = nn.Parameter(module.weight.qdata.float() * module.weight.scale)  # type: ignore[operator]
    return wide.float()


@pytest.mark.parametrize("inputs", [16, 64, 96, 192])  # some are no multiple of what an instruction takes in
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 15, 16, 17, 33, 50])
def test_a_row_is_multiplied_rightly_and_alike_among_any_others(count: int, inputs: int) -> None:
    weight, packed = weights(96, inputs)
    x = rows(count, inputs)
    found = linear(x, packed, None, 96)
    assert torch.equal(found, torch.cat([linear(row, packed, None, 96) for row in x.split(1)]))
    wide = weight.qdata.double() * weight.scale.double()
    wanted, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    # inputs are rounded to 2^15 steps either way, the sums of two digits and their sum to fp32
    steps = x.double().abs().amax(1, keepdim=True) / 2**15
    bound = 0.51 * steps * wide.abs().sum(1) + 2**-20 * (sizes + 256 * steps * wide.abs().sum(1))
    assert (found - wanted).abs().le(bound).all()


def test_inputs_that_are_no_numbers_give_none() -> None:
    _, packed = weights(64, 64)
    for off in (torch.nan, torch.inf, -torch.inf):
        x = rows(3, 64)
        x[1, 17] = off
        assert linear(x, packed, None, 64).isfinite().all(1).tolist() == [True, False, True]


def test_inputs_of_nothing_give_nothing() -> None:
    _, packed = weights(64, 64)
    assert not linear(torch.zeros(3, 64), packed, None, 64).any()


@pytest.mark.skipif(not HAS_UNITS, reason="this processor has no matrix units (AMX): lanes are what it has")
def test_lanes_and_matrix_units_multiply_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, packed), x = weights(96, 192), rows(23, 192)
    expected = linear(x, packed, None, 96)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = tuple("-O1" if flag == "-O3" else flag for flag in building.FLAGS)
    monkeypatch.setattr(building, "FLAGS", (*flags, "-mno-amx-bf16", "-mno-amx-int8"))
    building.library.cache_clear()
    try:
        assert not building.has_matrix_units()
        assert torch.equal(linear(x, packed, None, 96), expected)
    finally:
        building.library.cache_clear()


@pytest.mark.parametrize("dim", [64, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_say_what_the_weights_say(dim: int, dtype: torch.dtype) -> None:
    target = quantized(target_in(dtype, dim=dim), 8)
    assert isinstance(target, Transformer)
    expected, found = (Passes(t).score(CODES, TREE).logits for t in (full(target), twin_of(target)))
    unrounded = Passes(target_in(dtype, dim=dim)).score(CODES, TREE).logits
    # rounding weights is what changes logits, not how they are multiplied
    assert float((found - expected).abs().mean()) < 0.1 * float((unrounded - expected).abs().mean())


@pytest.mark.parametrize("dim", [64, 160])
def test_logits_are_the_same_bits_alone_in_a_tree_and_in_a_batch(dim: int) -> None:
    check_bits(twin_of(quantized(target_in(torch.bfloat16, dim=dim), 8)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_methods_give_the_codes_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    engine, sampling = Engine(fused=True, int8=True), Sampling(guidance=7.5)
    target = target_in(dtype)
    module, trained = tiny_eagle(target).to(dtype), tiny_parts(target)
    how: dict[str, Any] = {"sampling": sampling, "drafter_module": module, "trained": trained, "engine": engine}
    plain = build("plain", target, **how)
    assert plain.target is quantized(target, 8)
    expected = plain.generate(CONDITION, keys=KEYS).codes
    assert torch.equal(build(name, target, **how).generate(CONDITION, keys=KEYS).codes, expected)


def test_fused_drafters_of_8_bits_say_nearly_what_full_ones_say() -> None:
    target = target_in(torch.bfloat16)
    module = tiny_eagle(target).bfloat16()
    features = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(9)[None]
    fused = twin_of(target)
    with torch.no_grad():
        whole, narrow = (
            target_logits(fused, made.training_forward(features, tokens)).log_softmax(-1)
            for made in (fused_drafter(module), fused_drafter(module, int8=True))
        )
    assert 0 < float((narrow - whole).abs().max()) <= 0.1 * float(whole.std())
    assert fused_drafter(module, int8=True) is fused_drafter(module, int8=True) is not fused_drafter(module)


def test_some_weights_in_8_bits_and_some_not_are_refused() -> None:
    target = quantized(target_in(torch.bfloat16), 8)
    target.output = nn.Linear(64, 32, bias=False).bfloat16()
    with pytest.raises(ValueError, match="all weights of a model in 8 bits or none, here are both"):
        fuse_target(target)


def test_weights_have_4_bits_or_8() -> None:
    with pytest.raises(ValueError, match="choose one of int4 and int8"):
        Engine(int4=True, int8=True)
