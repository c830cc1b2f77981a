"""Chameleon with images, as Anole (arXiv:2405.09818, arXiv:2407.06135), and what has its decoder or VQ tokenizer.

Tokens of Chameleon are tokens of one vocabulary. The unconditional row is a prompt without words. transformers masks
the logits of tokens, so that body and head are called here. Of the VQ tokenizer transformers has the encoder only. Its
decoder is that of VQGAN (arXiv:2012.09841), as LlamaGen's is, but its released file has other names.

Lumina-mGPT (arXiv:2408.02657) is Chameleon's decoder with grids of any size and a newline token behind each row. The
prompt names the size in words, then in two tokens behind the one that begins an image. The unconditional row is these
three tokens alone, at positions from 0.

Liquid (arXiv:2412.04332) is a language model, such as Gemma, with the tokens of Chameleon's VQ tokenizer. The
unconditional row is a token of its own, with its own length and positions. Sizes of the VQ tokenizer other than the
release's are `vq_config` in config.json.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.io import check_finite, check_state, load_tensors, read_header, read_pickled, save_tensors
from lantern.core.types import Raster
from lantern.models.llamagen.vqvae import PixelDecoder, VQConfig
from lantern.models.transformers.components import (
    Components,
    PixelConfig,
    Pixels,
    Prompts,
    TextPrompts,
    check_own_size,
    grid_of,
)
from lantern.models.transformers.target import TransformersTarget, causal_target, vocabulary_target

GENERATION = {"guidance": 3.0, "temperature": 0.7, "top_p": 0.9, "method": "auto"}
PREFIX = "model.vqmodel."
DECODER_NAME = "vq_decoder.safetensors"  # what `lantern convert` writes
PARTS = ("decoder.", "post_quant_conv.")
CHECKPOINTS = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")
LUMINA_GENERATION = {"guidance": 4.0, "temperature": 1.0, "top_k": 2000, "method": "auto"}
LUMINA_SIZE = (768, 768)
LUMINA_BEGIN, LUMINA_END_OF_TURN, LUMINA_NEWLINE = "<racm3:break>", "<reserved08706>", "<reserved08799>"
LUMINA_FIRST_SIZE = 8800  # <reserved08800 + n> stands for n patches of two tokens
LIQUID_GENERATION = {"guidance": 7.0, "temperature": 0.99, "top_k": 4096, "top_p": 0.96, "method": "auto"}
LIQUID_TEMPLATE = "{} Generate an image based on this description.<boi>"
LIQUID_UNCONDITIONAL = "<unconditional><boi>"


class VQDecoder(nn.Module):
    """Vectors of tokens to pixels: LlamaGen's decoder with attention in the middle only.

    ValueError for a config with attention by resolution.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.attn_resolutions:
            raise ValueError(f"vq_config.attn_resolutions is {config.attn_resolutions}, wanted none, as in the release")
        widths = tuple(config.channel_multiplier)
        sizes: Any = {"z_channels": config.latent_channels, "ch": config.base_channels}
        sizes |= {"encoder_ch_mult": widths, "decoder_ch_mult": widths, "num_res_blocks": config.num_res_blocks}
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = PixelDecoder(VQConfig(**sizes))
        self.decoder.conv_blocks[0].attn = nn.ModuleList()

    def forward(self, vectors: Float[Tensor, "b d h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Decode a grid of vectors."""
        return self.decoder(self.post_quant_conv(vectors))


def read_decoder(folder: Path, config: Any) -> VQDecoder:
    """Read the decoder of a model's folder: from its safetensors files, or from the VQGAN file of Chameleon's release.

    ValueError where there is neither, for a damaged file, and for tensors of another shape.
    """
    wanted, found = tuple(PREFIX + part for part in PARTS), dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        names = [name for name in read_header(path) if name.startswith(wanted)]
        found |= {name.removeprefix(PREFIX): tensor for name, tensor in load_tensors(path, names).items()}
    if any(name.startswith("decoder.") for name in found):
        return decoder_of(found, config, source=folder)
    source = vqgan_file(folder, "decoder")
    return decoder_of(checkpoint_state(source), config, source=source)


def vqgan_file(folder: Path, part: str) -> Path:
    """Return the VQGAN file in a model's folder; ValueError that it holds no VQ `part` where there is none."""
    for name in CHECKPOINTS:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(
        f"{folder} holds no VQ {part}: put {CHECKPOINTS[0]} of Chameleon's release into it,"
        " or write the tokens only (--tokens)"
    )


def decoder_of(state: Mapping[str, Tensor], config: Any, *, source: Path) -> VQDecoder:
    """Return the decoder among the tensors of a VQ tokenizer; ValueError for a missing one, or another shape."""
    found = {key: tensor for key, tensor in state.items() if key.startswith(PARTS)}
    check_finite(found, source=source)
    with torch.device("meta"):
        made = VQDecoder(config)
    renamed = of_vqgan(found, len(config.channel_multiplier))
    check_state(renamed, made.state_dict(), source=source)
    made.load_state_dict({name: tensor.float() for name, tensor in renamed.items()}, assign=True)
    return made.eval().requires_grad_(False)


def save_decoder(decoder: VQDecoder, folder: Path) -> None:
    """Write a decoder to a model's folder, where `read_decoder` finds it."""
    state = {PREFIX + name: tensor for name, tensor in decoder.state_dict().items()}
    save_tensors(state, folder / DECODER_NAME)


def checkpoint_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a VQGAN file, without those of its training loss; ValueError for a file of another kind."""
    loaded = read_pickled(path)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    named = {str(key): value for key, value in state.items()} if isinstance(state, dict) else {}
    found = {key: tensor for key, tensor in named.items() if isinstance(tensor, Tensor) and not key.startswith("loss.")}
    if "decoder.conv_in.weight" not in found:
        raise ValueError(f"{path} holds no VQGAN: tensor 'decoder.conv_in.weight' is missing")
    return found


def fill(vq: nn.Module, state: Mapping[str, Tensor], *, source: Path) -> None:
    """Give a module without values its tensors of a state, in fp32; ValueError for missing ones, other shapes, NaN."""
    check_finite(state, source=source)
    expected = vq.state_dict()
    own = {name: tensor.float() for name, tensor in state.items() if name in expected}
    check_state(own, expected, source=source)
    vq.load_state_dict(own, assign=True)
    vq.requires_grad_(False)


def of_vqgan(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return VQGAN's tensors under LlamaGen's names, whose decoder begins with the lowest resolution.

    VQGAN's begins with the highest, which alone has no upsampling; some conversions have LlamaGen's order.
    """
    is_released = "decoder.up.0.upsample.conv.weight" not in state

    def level(found: re.Match[str]) -> str:
        return f"decoder.conv_blocks.{levels - 1 - int(found[1]) if is_released else found[1]}."

    found = {}
    for name, tensor in state.items():
        for place, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{part}.", f".mid.{place}.")
        name = re.sub(r"^decoder\.up\.(\d+)\.", level, name).replace("encoder.down.", "encoder.conv_blocks.")
        found[name.replace(".block.", ".res.")] = tensor
    return found


class ChameleonPixels(Pixels):
    """Chameleon's VQ decoder, whose weights transformers' class does not hold: `read` takes them from the folder."""

    def __init__(self, vq: Any, raster: Raster) -> None:
        super().__init__(vq, PixelConfig.of(vq.config), raster, None)
        self.decoder: VQDecoder | None = None

    def read(self, folder: Path) -> None:
        """Read the decoder's weights; ValueError where the folder holds none."""
        self.decoder = read_decoder(folder, self.vq.config).to(self.device)

    def outline(self) -> None:
        """Make the decoder on the meta device."""
        with torch.device("meta"):
            self.decoder = VQDecoder(self.vq.config)

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels."""
        return self.vq.encode(pixels).image_tokens.view(len(pixels), self.raster.rows, self.raster.columns)

    def paint(self, grids: Int[Tensor, "b rows columns"]) -> Float[Tensor, "b 3 h w"]:
        """Decode grids; ValueError if no decoder was read."""
        if self.decoder is None:
            raise ValueError("the model was loaded without its VQ decoder: it can make tokens but no images")
        return self.decoder(self.codebook[grids].permute(0, 3, 1, 2))


class ChameleonPrompts(Prompts):
    """A prompt, the end of the user's turn, and the token that begins an image."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt, and those of one without words."""
        ids = self.processor(text=prompt)["input_ids"][0].tolist()
        first, begin = self.processor.tokenizer.bos_token_id, self.processor.image_start_token_id
        return [*([first] if ids[0] != first else []), *ids, begin], [first, begin]


def own_raster(config: Any, size: tuple[int, int] | None) -> Raster:
    """Return the grid of a VQ tokenizer's resolution; ValueError for another `size`."""
    check_own_size(size, config.resolution)
    side = config.resolution // PixelConfig.of(config).downsample
    return Raster(side, side)


def target_of(model: Any, family: str, raster: Raster) -> TransformersTarget:
    """Return the target of a `ChameleonForConditionalGeneration`."""
    body = model.model
    tokens = body.vocabulary_mapping.img2bpe_mapping_tensor.long()
    return vocabulary_target(body, body.embed_tokens, model.lm_head, tokens, family=family, raster=raster)


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a `ChameleonForConditionalGeneration`; ValueError for another `size` than its own."""
    vq = model.model.vqmodel.float()
    raster = own_raster(vq.config, size)
    text = None if processor is None else ChameleonPrompts(processor)
    return Components(target_of(model, "chameleon", raster), ChameleonPixels(vq, raster), text, GENERATION)


class LuminaPrompts(Prompts):
    """The instruction of the release around a prompt, and the size of the image; ValueError for an unknown size."""

    def __init__(self, tokenizer: Any, raster: Raster, side: int) -> None:
        self.tokenizer = tokenizer
        self.size = f"{raster.columns * side}x{raster.rows * side}"
        patches = (f"<reserved{LUMINA_FIRST_SIZE + tokens // 2:05d}>" for tokens in (raster.rows, raster.columns))
        self.begin = tokenizer.convert_tokens_to_ids([LUMINA_BEGIN, *patches])
        if any(token in (None, tokenizer.unk_token_id) for token in self.begin):
            raise ValueError(f"the tokenizer has no tokens for images of {self.size}: choose another size")

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt, and those of the image's beginning."""
        text = f"Generate an image of {self.size} according to the following prompt:\n{prompt}{LUMINA_END_OF_TURN}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [self.tokenizer.bos_token_id, *ids, *self.begin], self.begin


def assemble_lumina(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a Lumina-mGPT for images of `size`, by default 768 x 768 pixels."""
    vq = model.model.vqmodel.float()
    side = PixelConfig.of(vq.config).downsample
    patch_rows, patch_columns = grid_of(size or LUMINA_SIZE, 2 * side)
    newline = model.config.vocabulary_map[LUMINA_NEWLINE]
    raster = Raster(2 * patch_rows, 2 * patch_columns, newline=newline)
    text = None if processor is None else LuminaPrompts(processor, raster, side)
    return Components(target_of(model, "lumina", raster), ChameleonPixels(vq, raster), text, LUMINA_GENERATION)


class LiquidPixels(ChameleonPixels):
    """Chameleon's VQ tokenizer, all of which `read` takes from `vqgan.ckpt`; until then it has no values."""

    def read(self, folder: Path) -> None:
        """Read encoder, codebook and decoder; ValueError where the folder holds no VQGAN file."""
        source = vqgan_file(folder, "tokenizer")
        state = checkpoint_state(source)
        fill(self.vq, state, source=source)
        self.decoder = decoder_of(state, self.vq.config, source=source)

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels; ValueError if the VQ tokenizer was not read."""
        if self.decoder is None:
            raise ValueError("the model was loaded without its VQ tokenizer, which encodes images")
        return super().quantize(pixels)


def assemble_liquid(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a Liquid; ValueError for another `size` than its own."""
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

    config = ChameleonVQVAEConfig(**model.config.to_dict().get("vq_config", {}))
    with torch.device("meta"):
        vq = ChameleonVQVAE(config)
    raster = own_raster(config, size)
    target = causal_target(model, processor, config.num_embeddings, family="liquid", raster=raster)
    text = None if processor is None else TextPrompts(processor, LIQUID_TEMPLATE, LIQUID_UNCONDITIONAL)
    return Components(target, LiquidPixels(vq, raster), text, LIQUID_GENERATION)
