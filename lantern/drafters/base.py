"""Shared by several families of drafters: guesses behind windows, inputs for tokens, logits of drafted features."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Target


@dataclass(frozen=True)
class Guesses:
    """Tokens in order of their places, and row by row the log q that they were sampled from (None: not recorded)."""

    tokens: Int[Tensor, "b n"]
    log_q: Float[Tensor, "b n v"] | None = None


def token_embeddings(target: Any, tokens: int) -> Float[Tensor, "v c"]:
    """Return the fp32 inputs that a target has for its tokens, from which drafters start."""
    numbers = torch.arange(tokens, device=target.tok_embeddings.weight.device)
    return target.tok_embeddings(numbers).detach().float()


def target_logits(target: Target, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """Return the fp32 logits of the next token from features, by the target's head."""
    return target.head(features.to(target.tok_embeddings.weight.dtype))
