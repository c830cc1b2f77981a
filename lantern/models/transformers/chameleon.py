"""Chameleon with images, as Anole (arXiv:2405.09818, arXiv:2407.06135): tokens are tokens of one vocabulary.

The unconditional row is a prompt without words. transformers masks the logits of tokens, so that body and head are
called here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Raster
from lantern.models.transformers.chameleon_vq import VQDecoder, read_decoder
from lantern.models.transformers.components import Components, PixelConfig, Pixels, Prompts, check_own_size
from lantern.models.transformers.target import TransformersTarget, vocabulary_target

CLASS = "ChameleonForConditionalGeneration"
PROCESSOR = "AutoProcessor"
GENERATION = {"guidance": 3.0, "temperature": 0.7, "top_p": 0.9, "method": "auto"}


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
