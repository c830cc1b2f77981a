"""Models whose pixels are not made here, but tokens: SimpleAR and GLM-Image.

SimpleAR (arXiv:2504.11455) is Qwen2 with the tokens of the Cosmos tokenizer DV8x16x16. They are digits of finite scalar
quantisation (arXiv:2309.15505), so that their vectors are known without weights. The tokenizer itself is released as
TorchScript programs (`decoder.jit`), and lantern runs no code of a model's folder.

GLM-Image makes tokens of a small grid, then those of the large one, with positions in time, rows and columns. The loop
sees both as one row of tokens, the small grid first; the tokens of the image are the last. They are a plan for a
diffusion decoder, which lantern does not run.
"""

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.process import quiet
from lantern.core.types import Raster
from lantern.models.transformers.components import Components, PixelConfig, Pixels, Prompts, TextPrompts, grid_of
from lantern.models.transformers.target import TransformersTarget, causal_target, vocabulary_target

SIZE = (1024, 1024)
SIMPLEAR_GENERATION = {"guidance": 6.0, "temperature": 1.0, "method": "auto"}
SIMPLEAR_SIDE = 16
SIMPLEAR_LEVELS = (8, 8, 8, 5, 5, 5)
SIMPLEAR_TEMPLATE = "<|t2i|>A highly realistic image of {}<|soi|>"
# the negative prompt of the release
SIMPLEAR_UNCONDITIONAL = (
    "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth,"
    " bad eyes, bad limbs, distortion<|soi|>"
)
SIMPLEAR_REFUSAL = (
    "pixels of SimpleAR are made by TorchScript programs of the Cosmos tokenizer, and lantern runs no code of a model:"
    " write the tokens only: --tokens FILE without --out"
)
GLM_IMAGE_GENERATION = {"guidance": 1.0, "temperature": 0.9, "top_p": 0.75, "method": "auto"}
GLM_IMAGE_SIDE = 32
GLM_IMAGE_SMALL = 16  # the side of the small grid, if it is square
GLM_IMAGE_REFUSAL = (
    "pixels of GLM-Image are made by a diffusion model, which lantern does not run: write the tokens only:"
    " --tokens FILE without --out"
)


class TokensOnly(Pixels):
    """The vectors of the tokens of a model whose pixels are not made here: refused with ValueError, in words."""

    vectors: Tensor

    def __init__(self, vectors: Float[Tensor, "v d"], side: int, raster: Raster, refusal: str) -> None:
        super().__init__(None, PixelConfig(len(vectors), side), raster, None)
        self.refusal = refusal
        self.register_buffer("vectors", vectors, persistent=False)

    @property
    def codebook(self) -> Float[Tensor, "v d"]:
        """The vectors of the tokens."""
        return self.vectors

    def read(self, *_: Any, **__: Any) -> Any:
        """Raise ValueError."""
        raise ValueError(self.refusal)

    paint = quantize = read


def fsq_vectors(levels: tuple[int, ...]) -> Float[Tensor, "v d"]:
    """Return the vector of each token, in [-1, 1]: digit i of the token, the first least significant, has
    `levels[i]`.
    """
    digits, rest = [], torch.arange(prod(levels), device="cpu")
    for level in levels:
        digits.append((rest % level - level // 2) / (level // 2))
        rest = rest // level
    return torch.stack(digits, 1)


def assemble_simplear(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a SimpleAR for images of `size`, by default 1024 x 1024 pixels."""
    rows, columns = grid_of(size or SIZE, SIMPLEAR_SIDE)
    raster = Raster(rows, columns)
    levels = tuple(model.config.to_dict().get("vq_config", {}).get("levels", SIMPLEAR_LEVELS))
    vq = TokensOnly(fsq_vectors(levels), SIMPLEAR_SIDE, raster, SIMPLEAR_REFUSAL)
    target = causal_target(model, processor, vq.config.codebook_size, family="simplear", raster=raster)
    text = None if processor is None else TextPrompts(processor, SIMPLEAR_TEMPLATE, SIMPLEAR_UNCONDITIONAL)
    return Components(target, vq, text, SIMPLEAR_GENERATION)


class GlmImageTarget(TransformersTarget):
    """A target whose tokens have positions in time, rows and columns: the place of a token in its grid.

    `grids` are (rows, columns) in the order in which they are made.
    """

    offsets: Tensor

    def __init__(self, *parts: Any, grids: Sequence[tuple[int, int]], **sizes: Any) -> None:
        super().__init__(*parts, **sizes)
        self.register_buffer("offsets", offsets_of(grids).to(self.words.weight.device), persistent=False)

    def places(self, positions: Int[Tensor, "rows n"], first: Int[Tensor, "rows 1"]) -> Int[Tensor, "*rows n"]:
        """Return the positions of tokens behind prompts of `first` tokens; past the end they are those of the end."""
        return self.offsets[:, positions.clamp(max=self.offsets.shape[1] - 1)] + first


class GlmImagePrompts(Prompts):
    """The processor's chat template around a prompt, with the sizes of both grids behind it."""

    def __init__(self, processor: Any, size: tuple[int, int]) -> None:
        self.processor, self.size = processor, size

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt, and those of one without words, which the release does not use."""
        return self._tokens(prompt), self._tokens("")

    def _tokens(self, prompt: str) -> list[int]:
        message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
        how = {"tokenize": True, "return_dict": True, "target_h": self.size[0], "target_w": self.size[1]}
        with quiet():  # newer versions want the sizes under another name, which older ones do not have
            return list(self.processor.apply_chat_template([message], **how)["input_ids"][0])


def small_grid(rows: int, columns: int) -> tuple[int, int]:
    """Return rows and columns of the small grid of a large one: nearly its ratio, and 256 tokens or a little less."""
    ratio = rows / columns
    return int(math.sqrt(ratio) * GLM_IMAGE_SMALL), int(math.sqrt(1 / ratio) * GLM_IMAGE_SMALL)


def offsets_of(grids: Sequence[tuple[int, int]]) -> Int[Tensor, "3 n"]:
    """Return the positions in time, rows and columns of the tokens of grids, from 0, and those of the end."""
    found, start = [], 0
    for rows, columns in grids:
        row, column = torch.arange(rows * columns) // columns, torch.arange(rows * columns) % columns
        found.append(start + torch.stack([torch.zeros_like(row), row, column]))
        start += max(rows, columns)
    return torch.cat([*found, torch.full((3, 1), start)], 1)


def assemble_glm_image(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a `GlmImageForConditionalGeneration` for images of `size`, by default 1024 x 1024 pixels."""
    inner, size = model.model, size or SIZE
    large = grid_of(size, GLM_IMAGE_SIDE)
    grids = (small_grid(*large), large)
    raster = Raster(1, sum(rows * columns for rows, columns in grids))
    vectors = torch.nn.functional.normalize(inner.vqmodel.quantize.embedding.weight.detach().float(), dim=-1)
    body, tokens = inner.language_model, torch.arange(len(vectors), device=vectors.device)
    how = {"kind": GlmImageTarget, "family": "glm_image", "raster": raster, "grids": grids}
    target = vocabulary_target(body, body.embed_tokens, model.lm_head, tokens, **how)
    text = None if processor is None else GlmImagePrompts(processor, size)
    return Components(
        target, TokensOnly(vectors, GLM_IMAGE_SIDE, raster, GLM_IMAGE_REFUSAL), text, GLM_IMAGE_GENERATION
    )
