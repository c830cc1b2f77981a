"""Shared by several families of drafters: the chooser of children, and logits of drafted features."""

from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Target


class Chooser(Protocol):
    """Chooses the children of a drafter's nodes in its place, given their distributions depth by depth."""

    def children(self, log_q: Float[Tensor, "b f v"], depth: int, width: int) -> Int[Tensor, "b f k"]:
        """Return the first `width` children of f nodes of a depth, in sampling order; f is 1 if they share a row."""
        ...


def code_embeddings(target: Any, codes: int) -> Float[Tensor, "v c"]:
    """Return the fp32 inputs that a target has for its codes, from which drafters start."""
    numbers = torch.arange(codes, device=target.tok_embeddings.weight.device)
    return target.tok_embeddings(numbers).detach().float()


def target_logits(target: Target, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """Return the fp32 logits of the next code from features, by the target's head."""
    return target.draft_head(features.to(target.tok_embeddings.weight.dtype))
