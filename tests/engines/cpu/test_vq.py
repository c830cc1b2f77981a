"""The packed VQ decoder: convolutions against torch in fp64, and images against those of torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern.engines.cpu import vq as packing
from lantern.engines.cpu.build import has_amx
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cpu.vq import Convolution, PackedDecoder, packed_vq
from lantern.engines.engine import EAGER
from lantern.models.folder import load_model
from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_uint8
from tests.tiny import initialised

# largest errors of a convolution, of its largest output: of fp32, and of 16 bits of each number
TOLERANCE = {False: 2e-6, True: 8e-6}
MOST_DIFFERENT = {False: 1e-3, True: 5e-3}  # share of bytes that may differ from torch's, by 1
ASSETS = Path(__file__).parents[3] / "assets" / "lantern-emoji"


@torch.no_grad()
def reference(conv: nn.Conv2d, norm: nn.GroupNorm | None, x: Tensor, *, is_doubled: bool) -> Tensor:
    y = x.double().permute(0, 3, 1, 2)
    if norm is not None:
        y = F.silu(F.group_norm(y, norm.num_groups, norm.weight.double(), norm.bias.double(), norm.eps))
    y = F.interpolate(y, scale_factor=2.0) if is_doubled else y
    bias = None if conv.bias is None else conv.bias.double()
    return F.conv2d(y, conv.weight.double(), bias, padding=1).permute(0, 2, 3, 1)


@pytest.fixture(params=[False, True], ids=["lanes", "amx"])
def with_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pack weights for vector lanes, then for AMX where there is AMX."""
    if request.param and not has_amx():
        pytest.skip("this processor has no AMX")
    monkeypatch.setattr(packing, "has_amx", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "normed", "is_doubled"),
    [
        ((4, 4), 32, 32, True, False),
        ((13, 9), 32, 64, True, False),  # patches and blocks of all kinds of edges
        ((1, 1), 16, 3, False, False),
        ((3, 50), 48, 32, False, False),  # more tiles side by side than a block has
        ((20, 70), 64, 3, True, False),
        ((7, 5), 32, 96, False, True),
    ],
)
@torch.no_grad()
def test_a_convolution_is_that_of_fp64_within_rounding(
    with_amx: bool, size: tuple[int, int], inputs: int, outputs: int, normed: bool, is_doubled: bool
) -> None:
    torch.manual_seed(0)
    conv = initialised(nn.Conv2d(inputs, outputs, 3, padding=1, bias=normed))
    norm = initialised(nn.GroupNorm(inputs // 4, inputs, eps=1e-6)) if normed else None
    x = torch.randn(2, *size, inputs) + 3.0
    packed = Convolution(conv, norm, is_doubled=is_doubled)
    made, expected = packed(x), reference(conv, norm, x, is_doubled=is_doubled)
    assert packed.is_split == (with_amx and inputs % 32 == 0)
    error = (made[..., :outputs] - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[packed.is_split]


@pytest.mark.usefixtures("with_amx")
@torch.no_grad()
def test_bits_depend_neither_on_threads_nor_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, norm = initialised(nn.Conv2d(32, 64, 3, padding=1)), initialised(nn.GroupNorm(32, 32))
    x, packed = torch.randn(3, 24, 20, 32), Convolution(conv, norm)
    alone, part = torch.cat([packed(image[None]) for image in x]), packed(x[:1, :8])
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for _ in range(5):  # the first calls of a kind use one thread
            assert torch.equal(packed(x), alone)
            assert torch.equal(packed(x[:1, :8]), part)


@torch.no_grad()
def test_pictures_of_the_embedded_model_are_those_of_torch() -> None:
    model = load_model(ASSETS, parts=("vq",), engine="cpu")
    tokens = torch.randint(model.vq.config.codebook_size, (4, 256), generator=torch.Generator().manual_seed(0))
    check(model.pictures(tokens), to_uint8(model.vq.decode(tokens)))


TWO = VQConfig(codebook_size=64, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), ch=32)  # of two resolutions
FOUR = VQConfig(codebook_size=64, encoder_ch_mult=(1, 1, 2, 2), decoder_ch_mult=(1, 1, 2, 2), z_channels=32, ch=32)


@torch.no_grad()
@pytest.mark.usefixtures("with_amx")
@pytest.mark.parametrize(
    ("config", "size"), [(FOUR, (2, 49)), pytest.param(VQConfig(), (1, 256), marks=pytest.mark.slow)]
)
def test_pictures_of_tokenizers_are_those_of_torch(config: VQConfig, size: tuple[int, int]) -> None:
    """Of one with four resolutions, and of VQ-16 at 256 pixels."""
    vq = initialised(VQVAE(config))
    tokens = torch.randint(config.codebook_size, size, generator=torch.Generator().manual_seed(1))
    check(to_uint8(packed_vq(vq).decode(tokens)), to_uint8(vq.decode(tokens)))


def check(made: Tensor, expected: Tensor) -> None:
    apart = (made.int() - expected.int()).abs()
    assert expected.float().std() > 20, "no image to compare"
    assert apart.max() <= 1 and (apart > 0).float().mean() < MOST_DIFFERENT[packing.has_amx()]


def test_a_packed_tokenizer_follows_its_weights_and_is_kept() -> None:
    vq = initialised(VQVAE(TWO))
    first = packed_vq(vq)
    assert packed_vq(vq) is first and isinstance(first.decoder, PackedDecoder)
    assert not isinstance(vq.decoder, PackedDecoder)
    with torch.no_grad():
        vq.decoder.conv_out.weight.mul_(2)
    assert packed_vq(vq) is not first


def test_other_tokenizers_and_engines_decode_through_torch() -> None:
    vq, narrow = VQVAE(TWO), VQVAE(replace(TWO, z_channels=24))
    assert EAGER.prepare_part(vq) is vq and CpuEngine().prepare_part(narrow) is narrow
    half = vq.bfloat16()
    assert packing.packed_vq(half) is half
