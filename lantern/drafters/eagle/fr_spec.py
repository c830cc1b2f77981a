"""FR-Spec: EAGLE's head over the most frequent tokens only (arXiv:2502.14856).

q has its support in this subset S, verification covers all tokens. So the image stays that of plain decoding, and at
most p(S) of the drafts can be right. Tokens of images are used more evenly than the paper's words.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.dynamic import GrowingDrafter, Growth
from lantern.models.llamagen.transformer import check_limits

ABSENT = -1e30  # logit of tokens outside of S: finite, since the difference of two guidance rows must not be NaN


@dataclass(frozen=True)
class FrequencyConfig:
    """Number of tokens of the table, and the digest of the target whose images were counted."""

    vocab_size: int
    kind: Literal["fr-spec"] = "fr-spec"
    target: str | None = None

    def __post_init__(self) -> None:
        check_limits(self, "vocab_size")


class FrequencyTable(nn.Module):
    """How often each token occurred: the add-on of FR-Spec."""

    counts: Tensor

    def __init__(self, config: FrequencyConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("counts", torch.zeros(config.vocab_size, dtype=torch.int32))

    @classmethod
    def of_tokens(cls, tokens: Int[Tensor, "*b n"], vocab_size: int, target: str | None = None) -> "FrequencyTable":
        """Count the tokens of some images."""
        table = cls(FrequencyConfig(vocab_size, target=target))
        table.counts.copy_(torch.bincount(tokens.flatten(), minlength=vocab_size))
        return table

    @property
    def ranking(self) -> Int[Tensor, " v"]:
        """Return all tokens, the most frequent first, the lower index first among equals."""
        return self.counts.sort(descending=True, stable=True).indices


class FrSpecDrafter(EagleDrafter):
    """Drafts EAGLE's trees with the head's rows of the `vocabulary` most frequent tokens of a table; q is 0 elsewhere.

    ValueError for fewer tokens than a tree is wide, a table of another codebook, and a head without rows.
    """

    def __init__(self, module: Any, target: Any, table: FrequencyTable, *, vocabulary: int, **how: Any) -> None:
        if not isinstance(target.output, nn.Linear):
            raise ValueError("FR-Spec scores rows of a linear head, which this model lacks: use eagle1")
        if table.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"the frequency table is of {table.config.vocab_size} tokens, the model has {target.config.vocab_size}"
            )
        super().__init__(module, target, **how)
        self._frequent = table.ranking[:vocabulary].to(target.tok_embeddings.weight.device)
        self._head = target.output.weight[self._frequent].contiguous()
        if len(self._frequent) < (widest := self.tree.width):
            raise ValueError(
                f"the draft vocabulary has {len(self._frequent)} tokens, wanted at least {widest} for this tree"
            )

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        rows = F.linear(features.to(self._head.dtype), self._head).float()
        every = rows.new_full((*rows.shape[:-1], self.target.config.vocab_size), ABSENT)
        return every.index_copy(-1, self._frequent, rows)


class GrowingFrSpecDrafter(FrSpecDrafter, GrowingDrafter):
    """Drafts EAGLE-2's trees with the rows of a `share` of the tokens, at least as many as a tree is wide."""

    def __init__(
        self, module: Any, target: Any, *, table: FrequencyTable, share: float, growth: Growth, **how: Any
    ) -> None:
        vocabulary = max(round(share * table.config.vocab_size), growth.width)
        super().__init__(module, target, table, vocabulary=vocabulary, growth=growth, **how)
