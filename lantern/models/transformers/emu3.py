"""Emu3-Gen (arXiv:2409.18869): tokens are tokens of one vocabulary, and a newline token follows each row of them.

The unconditional row is a negative prompt of its own length. The image's size is part of both prompts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Raster
from lantern.models.transformers.components import Components, PixelConfig, Pixels, Prompts, grid_of
from lantern.models.transformers.target import vocabulary_target

GENERATION = {"guidance": 3.0, "temperature": 1.0, "top_k": 2048, "method": "auto"}
SIZE = (720, 720)
NEWLINE = "<|extra_200|>"
# the negative prompt of the release
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality,"
    " low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


class Emu3Pixels(Pixels):
    """The decoder of the video tokenizer, for a single image."""

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels."""
        sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
        return torch.stack(list(self.vq.encode(pixels, sizes).image_tokens))

    def paint(self, grids: Int[Tensor, "b rows columns"]) -> Float[Tensor, "b 3 h w"]:
        """Decode grids."""
        return self.vq.decode(grids)


class Emu3Prompts(Prompts):
    """A prompt, or the negative prompt, with the size of the image in tokens behind it."""

    def __init__(self, processor: Any, raster: Raster) -> None:
        self.processor = processor
        side = processor.downsample_ratio
        self.grid = {"ratio": f"{raster.columns}:{raster.rows}", "image_area": raster.tokens * side**2}

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt and of the negative prompt."""
        texts = [prompt, NEGATIVE]
        ids, negative = self.processor(text=texts, return_for_image_generation=True, **self.grid)["input_ids"]
        return list(ids), list(negative)


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of an `Emu3ForConditionalGeneration` for images of `size`, by default 720 x 720 pixels."""
    inner = model.model
    sizes = PixelConfig(inner.vqmodel.config.codebook_size, inner.vqmodel.spatial_scale_factor)
    rows, columns = grid_of(size or SIZE, sizes.downsample)
    raster = Raster(rows, columns, newline=model.config.vocabulary_map[NEWLINE])
    vq = Emu3Pixels(inner.vqmodel.float(), sizes, raster, processor)
    words, tokens = model.get_input_embeddings(), inner.vocabulary_mapping.img2bpe_mapping_tensor.long()
    target = vocabulary_target(inner.text_model, words, model.lm_head, tokens, family="emu3", raster=raster)
    text = None if processor is None else Emu3Prompts(processor, raster)
    return Components(target, vq, text, GENERATION)
