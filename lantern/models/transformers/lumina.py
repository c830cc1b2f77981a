"""Lumina-mGPT (arXiv:2408.02657): Chameleon's decoder with grids of any size and a newline token behind each row.

The prompt names the size in words, then in two tokens behind the one that begins an image. The unconditional row is
these three tokens alone, at positions from 0.
"""

from collections.abc import Sequence
from typing import Any

from lantern.core.types import Raster
from lantern.models.transformers.chameleon import ChameleonPixels, target_of
from lantern.models.transformers.components import Components, PixelConfig, Prompts, grid_of

CLASS = "ChameleonForConditionalGeneration"
PROCESSOR = "AutoTokenizer"
GENERATION = {"guidance": 4.0, "temperature": 1.0, "top_k": 2000, "method": "auto"}
SIZE = (768, 768)
BEGIN, END_OF_TURN, NEWLINE = "<racm3:break>", "<reserved08706>", "<reserved08799>"
FIRST_SIZE = 8800  # <reserved08800 + n> stands for n patches of two tokens


class LuminaPrompts(Prompts):
    """The instruction of the release around a prompt, and the size of the image; ValueError for an unknown size."""

    def __init__(self, tokenizer: Any, raster: Raster, side: int) -> None:
        self.tokenizer = tokenizer
        self.size = f"{raster.columns * side}x{raster.rows * side}"
        patches = (f"<reserved{FIRST_SIZE + tokens // 2:05d}>" for tokens in (raster.rows, raster.columns))
        self.begin = tokenizer.convert_tokens_to_ids([BEGIN, *patches])
        if any(token in (None, tokenizer.unk_token_id) for token in self.begin):
            raise ValueError(f"the tokenizer has no tokens for images of {self.size}: choose another size")

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt, and those of the image's beginning."""
        text = f"Generate an image of {self.size} according to the following prompt:\n{prompt}{END_OF_TURN}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [self.tokenizer.bos_token_id, *ids, *self.begin], self.begin


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a Lumina-mGPT for images of `size`, by default 768 x 768 pixels."""
    vq = model.model.vqmodel.float()
    side = PixelConfig.of(vq.config).downsample
    patch_rows, patch_columns = grid_of(size or SIZE, 2 * side)
    newline = model.config.vocabulary_map[NEWLINE]
    raster = Raster(2 * patch_rows, 2 * patch_columns, newline=newline)
    text = None if processor is None else LuminaPrompts(processor, raster, side)
    return Components(target_of(model, "lumina", raster), ChameleonPixels(vq, raster), text, GENERATION)
