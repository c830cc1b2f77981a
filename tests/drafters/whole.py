"""Training examples of whole images, computed without a cache, to compare with drafting."""

import torch
from torch import Tensor

from lantern.core.types import Condition
from lantern.drafters.examples import Examples
from lantern.models.llamagen.transformer import Transformer


@torch.no_grad()
def whole_pictures(target: Transformer, condition: Condition, codes: Tensor, guidance: float) -> Examples:
    """Examples of finished images: both rows' features that predict each code, and the prompt's."""
    assert condition.embeddings is not None and condition.mask is not None
    words, rows, prompts = condition.embeddings, [], []
    length = words.shape[1] + codes.shape[1] - 1
    for prompt in (target.cls_embedding(words), target.cls_embedding.unconditional(words)):
        inputs = torch.cat([prompt, target.tok_embeddings(codes[:, :-1])], 1)
        valid = torch.cat([condition.mask, torch.ones_like(codes[:, 1:], dtype=torch.bool)], 1)
        mask = torch.tril(valid[:, None] | ~valid[:, :, None])
        features = target.features(inputs, torch.arange(length).expand(len(codes), -1), mask)
        prompts.append(features[:, : words.shape[1] - 1])
        rows.append(features[:, words.shape[1] - 1 :])
    scales = torch.full((len(codes),), guidance)
    return Examples(codes, torch.stack(rows, 1), scales, words, condition.mask, torch.stack(prompts, 1))
