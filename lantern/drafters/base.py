"""Shared by several families of drafters: inputs for codes, and logits of drafted features."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.types import Target


def code_embeddings(target: Any, codes: int) -> Float[Tensor, "v c"]:
    """Return the fp32 inputs that a target has for its codes, from which drafters start."""
    numbers = torch.arange(codes, device=target.tok_embeddings.weight.device)
    return target.tok_embeddings(numbers).detach().float()


def target_logits(target: Target, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """Return the fp32 logits of the next code from features, by the target's head."""
    return target.head(features.to(target.tok_embeddings.weight.dtype))
