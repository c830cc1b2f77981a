"""Training examples of whole images, computed without a cache, to compare with drafting."""

import torch
from torch import Tensor

from lantern.core.types import Condition
from lantern.drafters.examples import Examples
from lantern.models.llamagen.transformer import Transformer
from tests.uncached import uncached


def whole_pictures(target: Transformer, condition: Condition, codes: Tensor, guidance: float = 3.0) -> Examples:
    """Examples of finished images: both rows' features that predict each code, and the prompt's."""
    features = uncached(target, condition, codes[:, :-1], "features")
    prompts, rows = features.split([features.shape[2] - codes.shape[1], codes.shape[1]], 2)
    scales = torch.full((len(codes),), guidance)
    return Examples(codes, rows, scales, condition.embeddings, condition.mask, prompts)
