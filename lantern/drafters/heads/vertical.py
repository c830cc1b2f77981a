"""Vertical heads: every committed token also predicts the token below it, kept in a pool (Hawk, NeurIPS 2025).

Horizontal heads guess the next tokens of the row as Medusa's do. When decoding reaches the row below, its places hold
guesses made one row earlier. The distributions of both are mixed there, and the tree takes the best tokens of the
mixture. The target still decides in raster order, so the pool does not affect exactness.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from lantern.core.sampling import Noise
from lantern.core.types import DraftTree, Prompt, Step, Target
from lantern.drafters.base import target_logits
from lantern.drafters.heads.marginals import MarginalDrafter
from lantern.drafters.heads.medusa import Medusa, MedusaConfig
from lantern.models.llamagen.transformer import check_grid


@dataclass(frozen=True)
class VerticalConfig(MedusaConfig):
    """Sizes: `depths` horizontal heads, and one for the token below."""

    kind: str = "vertical"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grid(self.block_size)

    @property
    def grid(self) -> int:
        """Tokens per row."""
        return math.isqrt(self.block_size)


class Vertical(Medusa):
    """The heads; the last is the vertical one."""

    config: VerticalConfig
    extra_heads = 1

    def targets(self, levels: int) -> list[tuple[int, int, int]]:
        """Return the horizontal heads' targets, and as one more depth the vertical head's: the token below."""
        return [*super().targets(levels), (levels + 1, self.config.grid, -1)]


class VerticalDrafter(MarginalDrafter):
    """Drafts trees from (1 - share) q_horizontal + share q_vertical, the latter where the pool has a guess.

    The pool holds a feature for each place of the image, guessed when the token above it was committed. ValueError
    unless `share` is from 0 to 1.
    """

    def __init__(self, module: Vertical, target: Target, *, share: float = 0.25, **common: Any) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share is {share}, wanted a weight of the pool's guesses from 0 to 1")
        super().__init__(module, target, **common)
        self.share = float(share)

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Empty the pool."""
        super().begin(prompt, noise)
        config, device, images = self.module.config, prompt.mask.device, len(prompt.mask)
        # Predictions of tokens that were not committed, or below the last row, go to one place past the picture.
        dtype = self.module.heads.fc.weight.dtype
        self.held.pool = torch.zeros(images, config.block_size + 1, config.dim, dtype=dtype, device=device)
        self.held.is_filled = torch.zeros(images, config.block_size + 1, dtype=torch.bool, device=device)

    def propose(self) -> DraftTree:
        """Run the target's head over the last horizontal guesses and the pool's guesses for the same places."""
        places = self.places()
        vertical = self.held.pool.take_along_dim(places[..., None], 1)
        both = target_logits(self.target, torch.cat([self.held.ahead, vertical], 1))
        horizontal, vertical = self.draft_sampling.filtered(both).chunk(2, dim=1)
        share = self.held.is_filled.gather(1, places)[..., None].float() * self.share
        log_q = torch.logaddexp(horizontal + torch.log1p(-share), vertical + share.log())
        return self.grow(self.scores(log_q, places).topk(self.tree.width, dim=-1).indices, log_q)

    def observe(self, step: Step) -> None:
        """Run all heads on the committed tokens and put the vertical guesses into the pool."""
        super().observe(step)
        predicted = self.module.heads(self.held.features, self.held.tokens, self.scales(self.held.places))
        outside, steps = self.held.pool.shape[1], torch.arange(step.tokens.shape[1], device=step.tokens.device)
        below = self.held.places + self.module.config.grid
        below = torch.where(steps < step.counts[:, None], below, outside).clamp(max=outside - 1)
        self.held.pool.scatter_(1, below[..., None].expand(-1, -1, predicted.shape[-1]), predicted[:, :, -1])
        self.held.is_filled.scatter_(1, below, True)
        self.held.ahead = predicted.take_along_dim(self.held.last[..., None, None], 1)[:, 0, : self.depth]
