"""Training examples of whole images, computed without a cache, to compare with drafting."""

import torch
from torch import Tensor

from lantern.core.types import Condition
from lantern.drafters.examples import Examples, fused_layers
from lantern.models.llamagen.transformer import Transformer
from tests.uncached import uncached


def whole_pictures(target: Transformer, condition: Condition, tokens: Tensor, guidance: float = 3.0) -> Examples:
    """Examples of finished images: both rows' features that predict each token, the prompt's, and inputs of layers."""
    features = uncached(target, condition, tokens[:, :-1], "features")
    prompts, rows = features.split([features.shape[2] - tokens.shape[1], tokens.shape[1]], 2)
    fused = uncached(target, condition, tokens[:, :-1], "fused", taps=fused_layers(target.config.n_layer))
    layers = fused[:, :, -tokens.shape[1] :].unflatten(-1, (3, -1)).transpose(2, 3)
    scales = torch.full((len(tokens),), guidance)
    return Examples(tokens, rows, scales, condition.embeddings, condition.mask, prompts, layers)
