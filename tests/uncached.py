"""Passes over prompts and tokens without cache, tree and collapsed prompt, with which tests compare."""

from typing import Literal

import torch
from torch import Tensor

from lantern.core.types import Condition
from lantern.models.llamagen.transformer import Transformer


@torch.no_grad()
def uncached(
    target: Transformer,
    condition: Condition,
    tokens: Tensor,
    of: Literal["logits", "features", "fused"] = "logits",
    *,
    rows: int = 2,
    seen: Tensor | None = None,
    taps: tuple[int, ...] = (),
) -> Tensor:
    """Return logits, features or inputs of layers at the slots of the prompt and at each token, `(b rows slots+n c)`.

    `seen (n n)` tells which tokens each token sees, by default itself and those before it. Padding sees padding.
    """
    words, mask = condition.embeddings, condition.mask
    assert words is not None and mask is not None
    slots = words.shape[1]
    valid = torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1)
    sees = torch.tril(valid[:, None] | ~valid[:, :, None])
    if seen is not None:
        sees[:, slots:, slots:] = seen
    positions = torch.arange(valid.shape[1]).expand(len(tokens), -1)
    prompts = (target.cls_embedding(words), target.cls_embedding.unconditional(words))[:rows]
    inputs = (torch.cat([prompt, target.tok_embeddings(tokens)], 1) for prompt in prompts)
    return torch.stack([getattr(target(x, positions, sees, taps=taps), of) for x in inputs], 1)
