"""FR-Spec: EAGLE-1's head over a subset of the tokens, the frequent ones and those near the neighbours.

The paper (arXiv:2502.14856) keeps the rows of the head for the most frequent words. Tokens of images are used more
evenly, but the next token is often close, in the codebook, to the tokens at the left and above. So S is a union:

    S(context) = the `vocabulary` most frequent tokens + the `near` nearest tokens of the left and of the upper token,
                 themselves included

q has its support in S. Verification covers all tokens, so the image stays that of plain decoding. At most p(S) of the
drafts can be right.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.noise import Noise
from lantern.core.types import Prefill
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.dynamic import GrowingDrafter, Growth
from lantern.drafters.trees.static import Level
from lantern.models.llamagen.transformer import check_limits


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


def nearest(table: Int[Tensor, "v k"], near: int) -> Int[Tensor, "v near"]:
    """Return for each token itself and its nearest tokens, `near` in all."""
    own = torch.arange(len(table), device=table.device)[:, None]
    return torch.cat([own, table[:, : near - 1].long()], 1) if near else own[:, :0]


def repeated(tokens: Int[Tensor, "*b n"], known: Bool[Tensor, " v"]) -> Bool[Tensor, "*b n"]:
    """Return which entries hold a token that is `known` or occurs at an earlier entry."""
    same = tokens[..., :, None] == tokens[..., None, :]
    before = torch.ones(same.shape[-2:], dtype=torch.bool, device=tokens.device).tril(-1)
    return known[tokens] | (same & before).any(-1)


ABSENT = -1e30  # logit of tokens outside of the draft vocabulary


class FrSpecDrafter(EagleDrafter):
    """An `EagleDrafter` that computes the head's rows in S only; the tokens `frequent` are always in S.

    `around` holds the tokens near each token, itself included; no columns give the paper's form. ValueError if S has
    fewer tokens than the tree is wide.
    """

    def __init__(
        self, *given: Any, frequent: Int[Tensor, " f"], around: Int[Tensor, "v near"], **settings: Any
    ) -> None:
        super().__init__(*given, **settings)
        widest = max(level.width for level in self.tree.levels())
        if len(frequent) < widest:
            raise ValueError(f"the draft vocabulary has {len(frequent)} tokens, wanted at least {widest} for this tree")
        weight = self.target.output.weight
        self.frequent, self.around = frequent, around
        self._weight, self._head = weight, weight[frequent].contiguous()
        self._is_frequent = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._is_frequent[frequent] = True
        self.grid = math.isqrt(self.target.config.block_size)

    def begin(self, prefill: Prefill, noise: Noise) -> None:
        """Read the prompt. In the first row the left neighbour is also the upper neighbour."""
        images, device = len(prefill.mask), prefill.mask.device
        room = self.target.config.block_size + max(self.most_committed, self.tree.depth + 1)
        self.held.grid = torch.zeros(images, room, dtype=torch.long, device=device)
        super().begin(prefill, noise)

    def _take(self, features: Float[Tensor, "b r m k"], tokens: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        super()._take(features, tokens, counts)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        self.held.grid.scatter_(1, self.known[:, None] + steps, tokens)
        self.held.left = tokens.gather(1, self.held.last)

    def _extend(
        self, features: Float[Tensor, "b r f c"], tokens: Int[Tensor, "b f"], level: Level, depth: int
    ) -> Float[Tensor, "b r f c"]:
        self.held.left = tokens
        return super()._extend(features, tokens, level, depth)

    def _sampler(self) -> None:
        """Return None: log q covers the tokens of S only."""
        return None

    def _log_q(self, features: Float[Tensor, "b r f c"], depth: int) -> Float[Tensor, "b f s"]:
        """Return log q over the tokens of S, which `_drafted` holds."""
        features = features.to(self._head.dtype)
        logits = F.linear(features, self._head).float()
        self._drafted = self.frequent.expand(*logits.shape[:1], *logits.shape[2:]).contiguous()
        if self.around.shape[1]:
            near = self._near(depth)
            rows = torch.einsum("brfc,bfsc->brfs", features, self._weight[near]).float()
            rows = rows.masked_fill(repeated(near, self._is_frequent)[:, None], -torch.inf)
            logits, self._drafted = torch.cat([logits, rows], -1), torch.cat([self._drafted, near], -1)
        if self.module.config.form == "guided":
            return self.draft_sampling.filtered(logits[:, 0])
        places = (self.known[:, None] + depth).clamp(max=self.count - 1).expand(-1, features.shape[2])
        # -inf in both guidance rows would give NaN as their difference.
        guided = self.draft_sampling.guide(logits.clamp(min=-1e30), places)
        return self.draft_sampling.filtered(guided.masked_fill(logits[:, 0] == -torch.inf, -torch.inf))

    def _near(self, depth: int) -> Int[Tensor, "b f s"]:
        """Return the tokens near the left and the upper neighbour of what follows nodes of a depth."""
        above = (self.known + depth - self.grid)[:, None]
        left = self.held.left
        upper = self.held.grid.gather(1, above.clamp(min=0)).expand_as(left)
        upper = torch.where(above < 0, left, upper)
        return torch.cat([self.around[left], self.around[upper]], -1)

    def _rank(self, log_q: Float[Tensor, "b f s"], level: Level, depth: int) -> Int[Tensor, "b f k"]:
        """Return the children of each node in sampling order, with the target's noise of their tokens."""
        places = (self.known[:, None] + depth).clamp(max=self.count - 1)
        noise = self.noise.gumbel(places).expand(-1, log_q.shape[1], -1)
        best = (log_q + noise.gather(-1, self._drafted)).topk(level.width, dim=-1).indices
        return self._drafted.gather(-1, best)


class GrowingFrSpecDrafter(GrowingDrafter):
    """Drafts EAGLE-2's trees with the head's rows of the tokens `frequent`; q is 0 elsewhere."""

    def __init__(self, *given: Any, frequent: Int[Tensor, " f"], **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._frequent, self._head = frequent, self.target.output.weight[frequent].contiguous()

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        rows = F.linear(features.to(self._head.dtype), self._head).float()
        # a finite floor, since the difference of two guidance rows must not be NaN
        every = rows.new_full((*rows.shape[:-1], self.target.config.vocab_size), ABSENT)
        return every.index_copy(-1, self._frequent, rows)


def fr_spec(
    module: Any,
    target: Any,
    table: FrequencyTable,
    neighbours: Tensor | None,
    *,
    vocabulary: int,
    near: int,
    **how: Any,
) -> FrSpecDrafter:
    """Return EAGLE-1's trees over the `vocabulary` most frequent tokens and `near` ones around each neighbour.

    ValueError for a table of another codebook, for `near` out of range, and for a head without rows.
    """
    ranking = _ranking(table, target)
    columns = 0 if neighbours is None else neighbours.shape[1]
    if not 0 <= near <= columns + 1:
        raise ValueError(f"near is {near}, wanted from 0 to {columns + 1}, the columns of the proximity table and one")
    around = torch.zeros(len(ranking), 0, dtype=torch.long, device=ranking.device)
    if neighbours is not None:
        around = nearest(neighbours.to(ranking.device), near)
    return FrSpecDrafter(module, target, frequent=ranking[:vocabulary], around=around, **how)


def growing_fr_spec(
    module: Any, target: Any, *, table: FrequencyTable, share: float, growth: Growth, **how: Any
) -> GrowingFrSpecDrafter:
    """Return EAGLE-2's trees over a `share` of the tokens, the most frequent; at least as many as a tree is wide."""
    ranking = _ranking(table, target)
    frequent = ranking[: max(round(share * len(ranking)), growth.width)]
    return GrowingFrSpecDrafter(module, target, frequent=frequent, growth=growth, **how)


def _ranking(table: FrequencyTable, target: Any) -> Int[Tensor, " v"]:
    """Return the tokens by frequency; ValueError for a table of another codebook, and for a head without rows."""
    if not isinstance(target.output, nn.Linear):
        raise ValueError("FR-Spec scores rows of a linear head, which this model lacks: use eagle1")
    if table.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the frequency table is of {table.config.vocab_size} tokens, the model has {target.config.vocab_size}"
        )
    return table.ranking.to(target.tok_embeddings.weight.device)
