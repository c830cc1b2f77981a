"""Liquid (arXiv:2412.04332): a language model, such as Gemma, with the tokens of Chameleon's VQ tokenizer.

The unconditional row is a token of its own, with its own length and positions. Sizes of the VQ tokenizer other than the
release's are `vq_config` in config.json.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.io import check_finite, check_state
from lantern.models.transformers.chameleon import ChameleonPixels, checkpoint_state, decoder_of, own_raster, vqgan_file
from lantern.models.transformers.components import Components, TextPrompts
from lantern.models.transformers.target import causal_target

CLASS = "GemmaForCausalLM"
PROCESSOR = "AutoTokenizer"
GENERATION = {"guidance": 7.0, "temperature": 0.99, "top_k": 4096, "top_p": 0.96, "method": "auto"}
TEMPLATE = "{} Generate an image based on this description.<boi>"
UNCONDITIONAL = "<unconditional><boi>"


class LiquidPixels(ChameleonPixels):
    """Chameleon's VQ tokenizer, all of which `read` takes from `vqgan.ckpt`; until then it has no values."""

    def read(self, folder: Path) -> None:
        """Read encoder, codebook and decoder; ValueError where the folder holds no VQGAN file."""
        source = vqgan_file(folder, "tokenizer")
        state = checkpoint_state(source)
        check_finite(state, source=source)
        expected = self.vq.state_dict()
        own = {name: tensor.float() for name, tensor in state.items() if name in expected}
        check_state(own, expected, source=source)
        self.vq.load_state_dict(own, assign=True)
        self.vq.requires_grad_(False)
        self.decoder = decoder_of(state, self.vq.config, source=source)

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels; ValueError if the VQ tokenizer was not read."""
        if self.decoder is None:
            raise ValueError("the model was loaded without its VQ tokenizer, which encodes images")
        return super().quantize(pixels)


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a Liquid; ValueError for another `size` than its own."""
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

    config = ChameleonVQVAEConfig(**model.config.to_dict().get("vq_config", {}))
    with torch.device("meta"):
        vq = ChameleonVQVAE(config)
    raster = own_raster(config, size)
    target = causal_target(model, processor, config.num_embeddings, family="liquid", raster=raster)
    text = None if processor is None else TextPrompts(processor, TEMPLATE, UNCONDITIONAL)
    return Components(target, LiquidPixels(vq, raster), text, GENERATION)
