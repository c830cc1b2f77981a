"""Targets of any causal language model of transformers whose vocabulary ends with the tokens of images.

Token c of an image is word `len(tokenizer) + c` of the vocabulary. Only these are sampled, while the releases sample
from the whole vocabulary and clamp what is no token.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lantern.core.types import Raster
from lantern.models.transformers.components import Prompts
from lantern.models.transformers.target import TransformersTarget, vocabulary_target


class TextPrompts(Prompts):
    """A template around a prompt, `{}` in its place, and a fixed text of the unconditional row."""

    def __init__(self, tokenizer: Any, template: str, unconditional: str) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.unconditional = tokenizer(unconditional)["input_ids"]

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt and of the unconditional row."""
        return self.tokenizer(self.template.replace("{}", prompt))["input_ids"], self.unconditional


def causal_target(model: Any, tokenizer: Any | None, tokens: int, *, family: str, raster: Raster) -> TransformersTarget:
    """Return the target of a causal language model; without a tokenizer its shape only.

    ValueError for a vocabulary without the tokens, and for layers that this adapter does not reproduce.
    """
    sizes = model.config.to_dict()
    if any(kind != "full_attention" for kind in sizes.get("layer_types") or ()) or sizes.get("final_logit_softcapping"):
        raise ValueError(f"{sizes['model_type']} has windows of attention or capped logits, which are not supported")
    words, first = model.get_input_embeddings(), 0 if tokenizer is None else len(tokenizer)
    if tokenizer is None and not words.weight.is_meta:
        raise ValueError("the tokenizer is needed: tokens follow its tokens")
    if (most := words.weight.shape[0]) < first + tokens:
        raise ValueError(f"the vocabulary has {most} tokens, wanted {first} of the tokenizer and {tokens} tokens")
    numbers = torch.arange(first, first + tokens)
    return vocabulary_target(model.model, words, model.get_output_embeddings(), numbers, family=family, raster=raster)
