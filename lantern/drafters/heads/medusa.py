"""Medusa heads: the d-th token to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

Each head is residual, f + silu(W_d f), and returns a guidance-combined feature, which the target's head maps to a
distribution. There is no context and no cache, and a step costs one matrix product: this is the cheapest trained
drafter.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.types import DraftTree
from lantern.drafters.base import token_embeddings
from lantern.drafters.examples import Examples, Prediction, Trainee
from lantern.drafters.heads.marginals import MarginalDrafter
from lantern.models.llamagen.transformer import TransformerConfig, check_limits

MAX_DEPTHS = 64


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of `depths` heads for the tokens ahead. With `reads_token` they read the last token and the feature before
    it.

    `target` is the digest of the weights for which they were trained, None if unknown.
    ValueError for a value out of range.
    """

    dim: int
    vocab_size: int
    block_size: int
    depths: int = 4
    reads_token: bool = True
    kind: str = "medusa"
    target: str | None = None

    def __post_init__(self) -> None:
        if self.kind != type(self).kind:
            raise ValueError(f'kind is "{self.kind}", wanted "{type(self).kind}"')
        if not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}")
        check_limits(self, "dim", "vocab_size", "block_size")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> Self:
        """Return a config with its target's width."""
        fields: dict[str, Any] = {"dim": config.dim, "vocab_size": config.vocab_size, "block_size": config.block_size}
        return cls(**(fields | changes))


class FeatureHeads(nn.Module):
    """`count` residual heads as one matrix; at the start each returns its input.

    With `vocab_size` they also read the embedding of the token that followed (as Hydra's first head does,
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
        """Return for each head the feature that it estimates; `scales` is the guidance scale at each given feature."""
        base = features.to(self.fc.weight.dtype)
        read = base if self.embed_tokens is None else torch.cat([self.embed_tokens(tokens), base], -1)
        change = self.fc(read) + (scales.log()[..., None] * self.guidance).to(base.dtype)
        return base[:, :, None] + nn.functional.silu(change).unflatten(-1, (self.count, -1))


class Medusa(Trainee):
    """The heads: one for each of the `depths` tokens ahead, then `extra_heads` others."""

    config: MedusaConfig
    extra_heads: ClassVar[int] = 0

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        count, vocab_size = config.depths + self.extra_heads, config.vocab_size if config.reads_token else None
        self.heads = FeatureHeads(config.dim, count, vocab_size=vocab_size)

    @property
    def least_depths(self) -> int:
        """The number of heads: each learns one depth."""
        return self.config.depths

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Start every head at "the predicted feature equals this one"."""
        self.heads.init_weights(token_embeddings(target, self.config.vocab_size))

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return the heads' predictions at every token."""
        tokens = examples.tokens
        predicted = self.heads(examples.guided, tokens, examples.scales[:, None].expand(tokens.shape))
        return [
            Prediction(depth, torch.arange(reach, tokens.shape[1], device=tokens.device), predicted[:, :-reach, head])
            for depth, reach, head in self.targets(min(depths, self.config.depths, tokens.shape[1] - 1))
        ]

    def targets(self, levels: int) -> list[tuple[int, int, int]]:
        """Return (depth, tokens ahead, number of the head) of what is trained on so many depths."""
        return [(depth, depth, depth - 1) for depth in range(1, levels + 1)]


class MedusaDrafter(MarginalDrafter):
    """Drafts trees from the heads' independent guesses."""

    def propose(self) -> DraftTree:
        """Run the heads and the target's head over `depth` features, and return the tree."""
        last = self.held.last
        feature = self.held.features.take_along_dim(last[..., None], 1)
        scales = self.scales(self.held.places.gather(1, last))
        return self.draft(self.module.heads(feature, self.root, scales)[:, 0, : self.depth])
