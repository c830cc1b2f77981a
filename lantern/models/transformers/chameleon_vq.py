"""The decoder of Chameleon's VQ tokenizer (arXiv:2405.09818), of which transformers has the encoder only.

It is the decoder of VQGAN (arXiv:2012.09841) with the names of its released file: the levels of `up` begin with the
highest resolution, and only the middle has attention.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lantern.core.config import read_json_object
from lantern.core.io import atomic_write, check_finite, check_state, read_pickled
from lantern.models.llamagen.vqvae import AttnBlock, ResnetBlock, Upsample, group_norm

PREFIX = "model.vqmodel."
DECODER_NAME = "vq_decoder.safetensors"  # what `lantern convert` writes
PARTS = ("decoder.", "post_quant_conv.")
CHECKPOINTS = ("vqgan.ckpt", "tokenizer/vqgan.ckpt")


class Decoder(nn.Module):
    """Latents at the resolution of the token grid to pixels."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in config.channel_multiplier]
        lowest = widths[-1]
        self.conv_in = nn.Conv2d(config.latent_channels, lowest, 3, padding=1)
        self.mid = nn.ModuleDict(
            {
                "block_1": ResnetBlock(lowest, lowest, 0.0),
                "attn_1": AttnBlock(lowest),
                "block_2": ResnetBlock(lowest, lowest, 0.0),
            }
        )
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):
            below = widths[min(i + 1, len(widths) - 1)]
            blocks = [ResnetBlock(width if j else below, width, 0.0) for j in range(config.num_res_blocks + 1)]
            level = nn.ModuleDict({"block": nn.ModuleList(blocks)})
            if i > 0:
                level["upsample"] = Upsample(width)
            self.up.append(level)
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Float[Tensor, "b z h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Map latents to pixels, nominally in [-1, 1]."""
        x = self.conv_in(z)
        for block in self.mid.values():
            x = block(x)
        for level in reversed(self.up):
            for name, part in level.items():  # type: ignore[operator]
                for block in part if name == "block" else (part,):
                    x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VQDecoder(nn.Module):
    """Vectors of tokens to pixels. ValueError for a config with attention by resolution."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.attn_resolutions:
            raise ValueError(f"vq_config.attn_resolutions is {config.attn_resolutions}, wanted none, as in the release")
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = Decoder(config)

    def forward(self, vectors: Float[Tensor, "b d h w"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Decode a grid of vectors."""
        return self.decoder(self.post_quant_conv(vectors))


def read_decoder(folder: Path, config: Any) -> VQDecoder:
    """Read the decoder of a model's folder: from its safetensors files, or from the VQGAN file of Chameleon's release.

    ValueError where there is neither, and for tensors of another shape.
    """
    if found := _of_safetensors(folder):
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
    ordered = _ordered(found, len(config.channel_multiplier), made.state_dict())
    check_state(ordered, made.state_dict(), source=source)
    made.load_state_dict({name: tensor.float() for name, tensor in ordered.items()}, assign=True)
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


def _of_safetensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    wanted = tuple(PREFIX + part for part in PARTS)
    names = {"model.safetensors", DECODER_NAME}
    if index.is_file():
        listed = read_json_object(index).get("weight_map") or {}
        names = {DECODER_NAME, *(file for key, file in listed.items() if key.startswith(wanted))}
    found: dict[str, Tensor] = {}
    for name in sorted(names):
        if (folder / name).is_file():
            with safe_open(folder / name, framework="pt") as file:
                found |= {
                    key.removeprefix(PREFIX): file.get_tensor(key) for key in set(file.keys()) if key.startswith(wanted)
                }
    return found if any(key.startswith("decoder.") for key in found) else {}


def _ordered(state: Mapping[str, Tensor], levels: int, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state whose levels begin with the highest resolution; some conversions have them the other way round.

    Only levels but the last of the decoder's way end in an upsampling.
    """
    is_reversed = "decoder.up.0.upsample.conv.weight" in state and "decoder.up.0.upsample.conv.weight" not in expected
    if not is_reversed:
        return dict(state)
    found = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[:2] == ["decoder", "up"] and parts[2].isdigit():
            parts[2] = str(levels - 1 - int(parts[2]))
        found[".".join(parts)] = tensor
    return found
