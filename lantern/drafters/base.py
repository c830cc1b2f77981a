"""Shared by several families of drafters: noise and widths of trees, inputs for tokens, logits of features."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.noise import Purpose
from lantern.core.sampling import Sampling
from lantern.core.types import Target
from lantern.drafters.trees.static import StaticTree

# whose noise ranks the children of a node; none in mode "point"
PURPOSE_OF_MODE = {"gumbel": Purpose.TARGET, "sampled": Purpose.DRAFT}


def check_draft(mode: str, tree: StaticTree, tokens: int) -> int:
    """Return the largest number of children of a node.

    ValueError for an unknown mode and for a tree wider than a codebook of so many tokens.
    """
    if mode not in ("gumbel", "sampled", "point"):
        raise ValueError(f'draft mode is "{mode}", wanted gumbel, sampled or point')
    width = max(level.width for level in tree.levels())
    if width > tokens:
        raise ValueError(f"the tree has {width} children at a node, wanted at most {tokens}: use a narrower one")
    return width


def ranking(sampling: Sampling) -> Sampling:
    """Return the sampling whose log q ranks children: at temperature 0 they are ranked by their logits."""
    return sampling.untruncated() if sampling.is_greedy else sampling


def token_embeddings(target: Any, tokens: int) -> Float[Tensor, "v c"]:
    """Return the fp32 inputs that a target has for its tokens, from which drafters start."""
    numbers = torch.arange(tokens, device=target.tok_embeddings.weight.device)
    return target.tok_embeddings(numbers).detach().float()


def target_logits(target: Target, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """Return the fp32 logits of the next token from features, by the target's head."""
    return target.head(features.to(target.tok_embeddings.weight.dtype))
