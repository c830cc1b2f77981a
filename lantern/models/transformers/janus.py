"""Janus and Janus-Pro (arXiv:2410.13848, arXiv:2501.17811): Llama with its own head and embedding of LlamaGen's tokens.

The unconditional row has the prompt's length: words are replaced by padding tokens, which are attended to.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.types import Raster
from lantern.models.transformers.components import Components, PixelConfig, Pixels, Prompts, check_own_size
from lantern.models.transformers.target import TransformersTarget

GENERATION = {"guidance": 5.0, "temperature": 1.0, "method": "auto"}


class JanusTokens(nn.Module):
    """Tokens to inputs of the decoder: their own embedding, and the aligner."""

    def __init__(self, embedding: nn.Embedding, aligner: nn.Module) -> None:
        super().__init__()
        self.embedding, self.aligner = embedding, aligner

    @property
    def weight(self) -> Tensor:
        """The tokens' embedding, of whose dtype and on whose device the target is."""
        return self.embedding.weight

    def forward(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n c"]:
        """Embed tokens."""
        return self.aligner(self.embedding(tokens))


class JanusPixels(Pixels):
    """The VQ decoder, which is LlamaGen's: vectors of tokens are normalised when they are used."""

    @property
    def codebook(self) -> Float[Tensor, "v d"]:
        """The normalised vectors."""
        return F.normalize(self.vq.quantize.embedding.weight.detach(), dim=-1)

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels: the token of the nearest direction, as in LlamaGen; transformers' class skips that."""
        vectors = F.normalize(self.vq.quant_conv(self.vq.encoder(pixels)), dim=1)
        return torch.einsum("bdhw,vd->bhwv", vectors, self.codebook).argmax(-1)

    def paint(self, grids: Int[Tensor, "b rows columns"]) -> Float[Tensor, "b 3 h w"]:
        """Decode grids."""
        return self.vq.decode(grids.flatten(1))


class JanusPrompts(Prompts):
    """The processor's chat template around a prompt, and the token that begins an image; ValueError without one."""

    def __init__(self, processor: Any, generation: Any) -> None:
        self.processor = processor
        if processor.chat_template is None:
            raise ValueError("the processor has no chat template, with which prompts are made (chat_template.jinja)")
        begin = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
        self.kept = (generation.bos_token_id, begin)
        self.padding = generation.pad_token_id

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt, and the same with all words replaced by padding tokens."""
        message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
        text = self.processor.apply_chat_template([message], add_generation_prompt=True)
        ids = self.processor(text=[text], generation_mode="image")["input_ids"][0].tolist()
        return ids, [id_ if id_ in self.kept else self.padding for id_ in ids]


def assemble(model: Any, processor: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of a `JanusForConditionalGeneration`; ValueError for another `size` than its own."""
    inner, side = model.model, model.config.vq_config.num_patches
    vq = JanusPixels(inner.vqmodel.float(), PixelConfig.of(inner.vqmodel.config), Raster(side, side), processor)
    check_own_size(size, side * vq.config.downsample)
    target = TransformersTarget(
        inner.language_model,
        inner.language_model.embed_tokens,
        JanusTokens(inner.generation_embeddings, inner.generation_aligner),
        inner.generation_head,
        tokens=vq.config.codebook_size,
        family="janus",
        raster=vq.raster,
    )
    text = None if processor is None else JanusPrompts(processor, model.generation_config)
    return Components(target, vq, text, GENERATION)
