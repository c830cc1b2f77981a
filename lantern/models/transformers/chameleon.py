"""Chameleon with images, as Anole (arXiv:2405.09818, arXiv:2407.06135): tokens are tokens of one vocabulary.

The unconditional row is a prompt without words. transformers masks the logits of tokens, so that body and head are
called here. Of the VQ tokenizer transformers has the encoder only. Its decoder is that of VQGAN (arXiv:2012.09841), as
LlamaGen's is, but its released file has other names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.io import atomic_write, check_finite, check_state, load_tensors, read_header, read_pickled
from lantern.core.types import Raster
from lantern.models.llamagen.vqvae import PixelDecoder, VQConfig
from lantern.models.transformers.components import Components, PixelConfig, Pixels, Prompts, check_own_size
from lantern.models.transformers.target import TransformersTarget, vocabulary_target

CLASS = "ChameleonForConditionalGeneration"
PROCESSOR = "AutoProcessor"
GENERATION = {"guidance": 3.0, "temperature": 0.7, "top_p": 0.9, "method": "auto"}
PREFIX = "model.vqmodel."
DECODER_NAME = "vq_decoder.safetensors"  # what `lantern convert` writes
PARTS = ("decoder.", "post_quant_conv.")
CHECKPOINTS = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")


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
    renamed = _renamed(found, len(config.channel_multiplier))
    check_state(renamed, made.state_dict(), source=source)
    made.load_state_dict({name: tensor.float() for name, tensor in renamed.items()}, assign=True)
    return made.eval().requires_grad_(False)


def save_decoder(decoder: VQDecoder, folder: Path) -> None:
    """Write a decoder to a model's folder, where `read_decoder` finds it."""
    from safetensors.torch import save_file

    with atomic_write(folder / DECODER_NAME) as temporary:
        save_file({PREFIX + name: tensor for name, tensor in decoder.state_dict().items()}, temporary)


def checkpoint_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a VQGAN file, without those of its training loss; ValueError for a file of another kind."""
    loaded = read_pickled(path)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else {}
    found = {key: tensor for key, tensor in state.items() if isinstance(tensor, Tensor) and not key.startswith("loss.")}
    if "decoder.conv_in.weight" not in found:
        raise ValueError(f"{path} holds no VQGAN: tensor 'decoder.conv_in.weight' is missing")
    return found


def _renamed(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return released tensors under LlamaGen's names, whose levels begin with the lowest resolution.

    The release begins with the highest, which alone has no upsampling; some conversions have them in LlamaGen's order.
    """
    is_released = "decoder.up.0.upsample.conv.weight" not in state

    def level(found: re.Match[str]) -> str:
        return f"decoder.conv_blocks.{levels - 1 - int(found[1]) if is_released else found[1]}."

    found = {}
    for name, tensor in state.items():
        for place, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f"decoder.mid.{part}.", f"decoder.mid.{place}.")
        found[re.sub(r"^decoder\.up\.(\d+)\.", level, name).replace(".block.", ".res.")] = tensor
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
