"""The LlamaGen VQ tokenizer: pictures to tokens and back (arXiv:2406.06525, section 3.1)."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from lantern.core.config import check_number
from lantern.models.llamagen.transformer import check_limits

MAX_MULTIPLE = 64  # of `ch`
CODEBOOK_USED = "quantize.codebook_used"  # a usage diagnostic among the tensors of a VQVAE, which some files lack


@dataclass(frozen=True)
class VQConfig:
    """Shape of a VQ tokenizer, in the reference's field names.

    Each entry of `encoder_ch_mult` is one resolution; between two of them the picture halves, so the
    downsampling is 2 ** (len - 1). ValueError for a value out of range.
    """

    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    codebook_l2_norm: bool = True
    encoder_ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    decoder_ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    z_channels: int = 256
    ch: int = 128
    num_res_blocks: int = 2
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder_ch_mult", tuple(self.encoder_ch_mult))
        object.__setattr__(self, "decoder_ch_mult", tuple(self.decoder_ch_mult))
        if self.ch < 32 or self.ch % 32:
            raise ValueError(f"ch is {self.ch}, wanted a multiple of 32 (group norm has 32 groups)")
        if not self.encoder_ch_mult or len(self.encoder_ch_mult) != len(self.decoder_ch_mult):
            wanted = "wanted one entry a resolution in each"
            raise ValueError(f"encoder_ch_mult and decoder_ch_mult differ in length, {wanted}")
        for name in ("encoder_ch_mult", "decoder_ch_mult"):
            for multiple in vars(self)[name]:
                check_number(name, multiple, 1, MAX_MULTIPLE, kind=int)
        check_number("dropout_p", self.dropout_p, 0, 1)
        check_limits(self, "codebook_size", "codebook_embed_dim", "z_channels", "ch", "num_res_blocks")

    @property
    def downsample(self) -> int:
        """Pixels along one side of one token."""
        return 2 ** (len(self.encoder_ch_mult) - 1)


def group_norm(channels: int) -> nn.GroupNorm:
    """The normalisation of all layers of the tokenizer."""
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Residual block: norm-swish-conv twice, added to the input."""

    def __init__(self, channels: int, out: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = group_norm(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm2 = group_norm(out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        """Map channels -> out at one resolution."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h + self.nin_shortcut(x)


class AttnBlock(nn.Module):
    """Single-head self-attention over all pixels, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Every pixel attends to every pixel."""
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.proj_out(out.transpose(1, 2).reshape(x.shape))


class Upsample(nn.Module):
    """Doubles the picture: nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Map (h, w) -> (2h, 2w)."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The blocks of one resolution; attention follows each residual block at the lowest one only."""

    def __init__(self, channels: int, out: int, *, blocks: int, has_attention: bool, dropout: float) -> None:
        super().__init__()
        self.res = nn.ModuleList([ResnetBlock(channels if i == 0 else out, out, dropout) for i in range(blocks)])
        self.attn = nn.ModuleList([AttnBlock(out) for _ in range(blocks if has_attention else 0)])
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """Residual blocks (with attention), then the change of resolution if this level has one."""
        for i, res in enumerate(self.res):
            x = res(x)
            if len(self.attn):
                x = self.attn[i](x)
        return self.upsample(self.downsample(x))


def middle(channels: int, dropout: float) -> nn.ModuleList:
    """Residual block, attention, residual block at the lowest resolution."""
    return nn.ModuleList(
        [ResnetBlock(channels, channels, dropout), AttnBlock(channels), ResnetBlock(channels, channels, dropout)]
    )


class PixelEncoder(nn.Module):
    """Pixels to `z_channels` latents at the resolution of the token grid."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.encoder_ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.conv_blocks, sizes = nn.ModuleList(), {"blocks": config.num_res_blocks, "dropout": config.dropout_p}
        for i, (inputs, width) in enumerate(pairwise((config.ch, *widths)), start=1):
            self.conv_blocks.append(level := Level(inputs, width, has_attention=i == len(widths), **sizes))
            if i < len(widths):
                halve = nn.Conv2d(width, width, 3, stride=2)  # after one pixel on the right and at the bottom
                level.downsample = nn.Sequential(OrderedDict(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=halve))
        self.mid = middle(widths[-1], config.dropout_p)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b z h2 w2"]:
        """Map pixels in [-1, 1] to latents."""
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class PixelDecoder(nn.Module):
    """Latents at the resolution of the token grid to pixels; its first block has the lowest resolution."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in reversed(config.decoder_ch_mult)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = middle(widths[0], config.dropout_p)
        self.conv_blocks, sizes = nn.ModuleList(), {"blocks": config.num_res_blocks + 1, "dropout": config.dropout_p}
        for i, (inputs, width) in enumerate(pairwise((widths[0], *widths)), start=1):
            self.conv_blocks.append(level := Level(inputs, width, has_attention=i == 1, **sizes))
            if i < len(widths):
                level.upsample = Upsample(width)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Float[Tensor, "b z h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Map latents to pixels, nominally in [-1, 1], not clamped."""
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Codebook(nn.Module):
    """The codebook; rows are l2-normalised when used, not when stored."""

    codebook_used: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.has_l2_norm = config.codebook_l2_norm
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_embed_dim)
        # Usage diagnostics of the released files, always this long; kept so that their keys match.
        self.register_buffer("codebook_used", torch.zeros(65536))

    def tokens(self) -> Float[Tensor, "v c"]:
        """The codebook as used at run time."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.has_l2_norm else weight

    def nearest(self, z: Float[Tensor, "n c"]) -> Int[Tensor, " n"]:
        """Index of the token nearest to each (normalised) vector."""
        tokens = self.tokens()
        z = F.normalize(z, dim=-1) if self.has_l2_norm else z
        distance = z.square().sum(1, keepdim=True) + tokens.square().sum(1) - 2 * z @ tokens.T
        return distance.argmin(dim=1)


class VQVAE(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = PixelEncoder(config)
        self.decoder = PixelDecoder(config)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)

    @property
    def codebook(self) -> Float[Tensor, "v c"]:
        """The tokens' vectors as the decoder uses them."""
        return self.quantize.tokens().detach()

    def latents(self, pixels: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Pixels in [-1, 1] to vectors before quantisation."""
        return self.quant_conv(self.encoder(pixels))

    def encode(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b n"]:
        """Pixels in [-1, 1] to tokens in raster order."""
        z = self.latents(pixels).permute(0, 2, 3, 1)
        return self.quantize.nearest(z.flatten(0, 2)).view(z.shape[0], -1)

    def decode_latents(self, quantised: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Quantised vectors to pixels, nominally in [-1, 1]."""
        return self.decoder(self.post_quant_conv(quantised))

    def decode(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b 3 h w"]:
        """Tokens of a square grid, in raster order, to pixels; ValueError for a token out of range or a ragged grid."""
        side = round(tokens.shape[1] ** 0.5)
        if side == 0 or side * side != tokens.shape[1]:
            raise ValueError(f"got {tokens.shape[1]} tokens an image, wanted a square grid")
        check_tokens(tokens, self.config.codebook_size)
        vectors = self.quantize.tokens()[tokens.long()].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        return self.decode_latents(vectors)


def check_tokens(tokens: Int[Tensor, "b n"], count: int) -> None:
    """Raise ValueError for tokens that are not below `count`; those on the meta device have no values."""
    if tokens.is_meta or not tokens.numel():
        return
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= count:
        raise ValueError(f"tokens are from {lowest} to {highest}, wanted 0 to {count - 1}")


def to_uint8(pixels: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b h w 3"]:
    """Pixels in [-1, 1] to bytes, rounded as the reference does: clamp(127.5 x + 128)."""
    return (127.5 * pixels.float() + 128.0).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def to_pixels(pictures: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
    """Bytes to pixels in [-1, 1]."""
    return pictures.float() / 127.5 - 1.0
