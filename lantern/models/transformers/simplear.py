"""SimpleAR (arXiv:2504.11455): Qwen2 with the tokens of the Cosmos tokenizer DV8x16x16.

Tokens are digits of finite scalar quantisation (arXiv:2309.15505), so that their vectors are known without weights. The
tokenizer itself is released as TorchScript programs (`decoder.jit`). lantern runs no code of a model's folder: it
writes tokens.
"""

from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.types import Raster
from lantern.models.transformers.components import Components, TextPrompts, TokensOnly, grid_of
from lantern.models.transformers.target import causal_target

CLASS = "Qwen2ForCausalLM"
PROCESSOR = "AutoTokenizer"
GENERATION = {"guidance": 6.0, "temperature": 1.0, "method": "auto"}
SIZE = (1024, 1024)
SIDE = 16
LEVELS = (8, 8, 8, 5, 5, 5)
TEMPLATE = "<|t2i|>A highly realistic image of {}<|soi|>"
# the negative prompt of the release
UNCONDITIONAL = (
    "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth,"
    " bad eyes, bad limbs, distortion<|soi|>"
)
NO_PIXELS = (
    "pixels of SimpleAR are made by TorchScript programs of the Cosmos tokenizer, and lantern runs no code of a model:"
    " write the tokens only (--tokens FILE)"
)


def fsq_vectors(levels: tuple[int, ...]) -> Float[Tensor, "v d"]:
    """Return the vector of each token, in [-1, 1]: digit i of the token, the first least significant, has
    `levels[i]`.
    """
    digits, rest = [], torch.arange(prod(levels), device="cpu")
    for level in levels:
        digits.append((rest % level - level // 2) / (level // 2))
        rest = rest // level
    return torch.stack(digits, 1)


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a SimpleAR for images of `size`, by default 1024 x 1024 pixels."""
    rows, columns = grid_of(size or SIZE, SIDE)
    raster = Raster(rows, columns)
    levels = tuple(model.config.to_dict().get("vq_config", {}).get("levels", LEVELS))
    vq = TokensOnly(fsq_vectors(levels), SIDE, raster, NO_PIXELS)
    target = causal_target(model, processor, vq.config.codebook_size, family="simplear", raster=raster)
    text = None if processor is None else TextPrompts(processor, TEMPLATE, UNCONDITIONAL)
    return Components(target, vq, text, GENERATION)
