"""The decoder of LlamaGen's tokenizer with its 3x3 convolutions in C++.

Activations are in fp32 and have their channels last. Attention and 1x1 convolutions run through torch. Products are in
fp32, with AMX in bf16 with 16 bits of each number; pixels differ from those of torch by rounding
(`tests/engines/cpu/test_vq.py` bounds errors and the bytes that differ).
"""

import copy
import ctypes
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor, nn

from lantern.core.weights import WeightCache, left_out
from lantern.engines.cpu.build import has_amx, library
from lantern.engines.cpu.structures import cpp
from lantern.engines.cpu.target import LANES, PANEL
from lantern.models.llamagen.vqvae import VQVAE, AttnBlock, Level, PixelDecoder, ResnetBlock, Upsample

# Winograd's F(4x4, 3x3) at the points of convolution.h: rows (1, p, p^2) / N(p), N the product of the differences to
# other points; the last point is infinity (arXiv:1509.09308, section 4.1)
POINTS = (
    (1, 0, 0),
    *((-1 / 1.5, sign * -(0.5**0.5) / 1.5, -0.5 / 1.5) for sign in (1, -1)),
    *((1 / 6, sign * 2**0.5 / 6, 2 / 6) for sign in (1, -1)),
    (0, 0, 1),
)


PAIRED = 32  # inputs of an AMX instruction


def split(weight: Float[Tensor, "o i 3 3"]) -> BFloat16[Tensor, "o16 i32 9 2 16 16 2"]:
    """Return weights as sums of two bf16 numbers, in the order of `ConvolutionArgs`."""
    high = weight.bfloat16()
    parts = torch.stack([high, (weight - high.float()).bfloat16()]).flatten(3)  # 2 o i 9
    tiles = parts.unflatten(1, (-1, LANES)).unflatten(3, (-1, PAIRED // 2, 2))  # 2 o16 16 i32 16 2 9
    return tiles.permute(1, 3, 6, 0, 4, 2, 5).contiguous()


def transformed(weight: Float[Tensor, "o i 3 3"]) -> Float[Tensor, "o32 36 i 32"]:
    """Return the weights of all points."""
    points = torch.tensor(POINTS, dtype=torch.float64)
    panels = weight.flatten(2).unflatten(0, (-1, PANEL)).permute(0, 3, 2, 1).flatten(2)
    transform = torch.kron(points, points)
    made = torch.stack([(transform @ panel.double()).float() for panel in panels])
    return made.unflatten(2, (-1, PANEL))


class Convolution:
    """A 3x3 convolution with padding 1, behind group normalisation and SiLU if `norm` is given.

    With `is_doubled` the input is first enlarged by two, by its nearest neighbour. Outputs are padded to a multiple of
    32, with AMX of 16.
    """

    def __init__(self, of: nn.Conv2d, norm: nn.GroupNorm | None = None, *, is_doubled: bool = False) -> None:
        self.is_split = has_amx() and of.in_channels % PAIRED == 0
        spare = -of.out_channels % (LANES if self.is_split else PANEL)
        weight = nn.functional.pad(of.weight.detach().float(), (0, 0, 0, 0, 0, 0, 0, spare))
        self.weights = split(weight) if self.is_split else transformed(weight)
        bias = of.weight.new_zeros(of.out_channels) if of.bias is None else of.bias.detach()
        self.bias = nn.functional.pad(bias.float(), (0, spare))
        self.norm = dict[str, Any]()
        if norm is not None:
            affine = {"gamma": norm.weight.detach().float(), "beta": norm.bias.detach().float()}
            self.norm = {"groups": norm.num_groups, "eps": norm.eps, **affine}
        self.inputs, self.outputs, self.is_doubled = of.in_channels, of.out_channels + spare, is_doubled

    def __call__(
        self, x: Float[Tensor, "b h w c"], *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Float[Tensor, "b h2 w2 d"]:
        """Return the convolution plus `residual`; `out` is written to, and may be `residual`."""
        images, height, width, inputs = x.shape
        size = (height << self.is_doubled, width << self.is_doubled)
        out = x.new_empty(images, *size, self.outputs) if out is None else out
        assert inputs == self.inputs and x.is_contiguous() and out.is_contiguous(), "not packed as expected"
        run = library().lantern_split_convolution if self.is_split else library().lantern_convolution
        given = {"images": images, "inputs": inputs, "outputs": self.outputs, "is_doubled": self.is_doubled}
        given |= {"height": size[0], "width": size[1], "threads": torch.get_num_threads(), **self.norm}
        given |= {"x": x, "weights": self.weights, "bias": self.bias, "residual": residual, "out": out}
        run(ctypes.byref(cpp.ConvolutionArgs(**given)))
        return out


class PackedBlock:
    """A residual block."""

    def __init__(self, of: ResnetBlock) -> None:
        self.first, self.second = Convolution(of.conv1, of.norm1), Convolution(of.conv2, of.norm2)
        self.shortcut = of.nin_shortcut

    def __call__(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w d"]:
        """Return the block's result; without a shortcut it replaces x."""
        if isinstance(self.shortcut, nn.Conv2d):
            own = nn.functional.linear(x, self.shortcut.weight.flatten(1), self.shortcut.bias)
        else:
            own = x
        return self.second(self.first(x), residual=own, out=own)


class PackedAttention:
    """An attention block through torch, with one product for queries, keys and values."""

    def __init__(self, of: AttnBlock) -> None:
        self.norm = of.norm
        self.weight = torch.cat([conv.weight.detach().flatten(1) for conv in (of.q, of.k, of.v)]).float()
        self.bias = torch.cat([cast(Tensor, conv.bias).detach() for conv in (of.q, of.k, of.v)]).float()
        self.out = of.proj_out

    def __call__(self, x: Float[Tensor, "b h w c"]) -> Float[Tensor, "b h w c"]:
        """Return the block's result."""
        normed = self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        joined = nn.functional.linear(normed.flatten(1, 2), self.weight, self.bias)
        q, k, v = joined[:, None].chunk(3, -1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + nn.functional.linear(seen, self.out.weight.flatten(1), self.out.bias).view_as(x)


class PackedDecoder(nn.Module):
    """`PixelDecoder` with packed convolutions."""

    def __init__(self, of: PixelDecoder) -> None:
        super().__init__()
        self.steps: list[Callable[[Tensor], Tensor]] = [Convolution(of.conv_in), *map(packed, of.mid)]
        for level in cast("list[Level]", of.conv_blocks):
            attention = [*level.attn] or [None] * len(level.res)
            for blocks in zip(level.res, attention, strict=True):
                self.steps += [packed(block) for block in blocks if block is not None]
            if isinstance(level.upsample, Upsample):
                self.steps.append(Convolution(level.upsample.conv, is_doubled=True))
        self.steps.append(Convolution(of.conv_out, of.norm_out))

    def forward(self, z: Float[Tensor, "b z h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Map latents to pixels, as `PixelDecoder.forward`."""
        x = z.float().permute(0, 2, 3, 1).contiguous()
        for step in self.steps:
            x = step(x)
        return x[..., :3].permute(0, 3, 1, 2)


def packed(block: nn.Module) -> PackedBlock | PackedAttention:
    """Return a residual or attention block, packed."""
    return PackedAttention(block) if isinstance(block, AttnBlock) else PackedBlock(cast(ResnetBlock, block))


Module = TypeVar("Module", bound=nn.Module)


def packed_vq(vq: Module) -> Module:
    """Return LlamaGen's tokenizer with a packed decoder; the rest is shared with the given one.

    The result is cached per tokenizer, and made again when its weights have changed. Tokenizers of other kinds, dtypes,
    devices and widths, and with hooks, are returned as they are.
    """
    if not isinstance(vq, VQVAE) or vq.config.z_channels % LANES or left_out(vq):
        return vq
    weight = vq.post_quant_conv.weight
    return cast(Module, _PACKED.get(vq)) if (weight.device.type, weight.dtype) == ("cpu", torch.float32) else vq


def _packed(vq: VQVAE) -> VQVAE:
    twin = copy.copy(vq)
    twin._modules = vq._modules | {"decoder": PackedDecoder(vq.decoder)}
    return twin


_PACKED: WeightCache[VQVAE] = WeightCache(_packed)
