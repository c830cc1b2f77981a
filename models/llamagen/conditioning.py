"""Conditioning of a LlamaGen transformer: a class or a caption, as its first slots."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.config import TransformerConfig


class LabelEmbedder(nn.Module):
    """Class number to one conditioning slot; the last row is the unconditional class."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_classes = config.num_classes
        self.embedding_table = nn.Embedding(config.num_classes + (config.class_dropout_prob > 0), config.dim)

    def forward(self, labels: Int[Tensor, " b"]) -> Float[Tensor, "b 1 c"]:
        """Embed labels in [0, num_classes); num_classes itself is the unconditional one."""
        return self.embedding_table(labels)[:, None]

    def unconditional(self, labels: Int[Tensor, " b"]) -> Float[Tensor, "b 1 c"]:
        """Return the guidance row of each label."""
        return self(torch.full_like(labels, self.num_classes))


class CaptionProjection(nn.Module):
    """Two bias-free linears with a tanh-GELU between: a zero (padding) row stays zero."""

    def __init__(self, caption_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Float[Tensor, "b t e"]) -> Float[Tensor, "b t c"]:
        """Map caption features to the model's width."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Caption features to conditioning slots, with the stored unconditional caption."""

    uncond_embedding: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.cap_proj = CaptionProjection(config.caption_dim, config.dim)
        # A buffer, as in the released files: random, never trained, and part of the weights.
        uncond = torch.randn(config.cls_token_num, config.caption_dim) / config.caption_dim**0.5
        self.register_buffer("uncond_embedding", uncond)

    def forward(self, captions: Float[Tensor, "b t e"]) -> Float[Tensor, "b t c"]:
        """Embed left-padded caption features; t may be shorter than cls_token_num (pads cut off)."""
        return self.cap_proj(captions)

    def unconditional(self, captions: Float[Tensor, "b t e"]) -> Float[Tensor, "b t c"]:
        """Return the guidance rows: the last t rows of the stored embedding, for any caption."""
        rows = self.uncond_embedding[-captions.shape[1] :].to(captions.dtype)
        return self.cap_proj(rows.expand(captions.shape[0], -1, -1))
