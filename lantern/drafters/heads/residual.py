"""Residual heads on one feature, each for a code further ahead: f + silu(W_d f) (arXiv:2401.10774)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class FeatureHeads(nn.Module):
    """`count` residual heads as one matrix; at the start each returns its input.

    With `vocab_size` they also read the embedding of the code that followed (as Hydra's first head does,
    arXiv:2402.05109); without it they read the feature alone. `guidance` times log s encodes the guidance scale of f.
    """

    def __init__(self, dim: int, count: int, *, vocab_size: int | None) -> None:
        super().__init__()
        self.count = count
        self.embed_tokens = None if vocab_size is None else nn.Embedding(vocab_size, dim)
        self.fc = nn.Linear(dim if vocab_size is None else 2 * dim, count * dim)
        self.guidance = nn.Parameter(torch.zeros(count * dim))

    def init_weights(self, embeddings: Float[Tensor, "v c"]) -> None:
        """Set heads that return their input, and copy the target's embeddings."""
        for parameter in (self.fc.weight, self.fc.bias, self.guidance):
            parameter.data.zero_()
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(embeddings)

    def forward(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"]
    ) -> Float[Tensor, "b n h c"]:
        """Return a feature for each head; `scales` is the guidance scale at each given feature."""
        base = features.to(self.fc.weight.dtype)
        read = base if self.embed_tokens is None else torch.cat([self.embed_tokens(tokens), base], -1)
        change = self.fc(read) + (scales.log()[..., None] * self.guidance).to(base.dtype)
        return base[:, :, None] + nn.functional.silu(change).unflatten(-1, (self.count, -1))
