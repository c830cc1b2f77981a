"""The cache of training-time test: every pass sees what drafting would see (arXiv:2503.01840)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Unroll:
    """Keys of all `passes` of a training-time test so far, as a cache that grows by one pass at a time.

    Query j of pass i sees true features (pass 1) at j - i + 1 and before, and of pass m > 1 the feature at j - i + m:

        pass 2, n = 3     | pass 1 | pass 2
        j = 0             | . . .  | 1 . .
        j = 1             | 1 . .  | . 1 .
        j = 2             | 1 1 .  | . . 1

    A drafter that reads a prompt sets `prompt`, the mask of its slots that the tokens see, and runs the prompt through
    this cache before the first pass. Every pass then sees the prompt, to the left of the columns above.
    """

    least_rows = 0

    def __init__(self, prompt: Bool[Tensor, "b t"] | None = None) -> None:
        self.passes = 0
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.prompt = prompt

    def next_mask(self, images: int, pairs: int, device: torch.device) -> Bool[Tensor, "b n s"]:
        """Start a pass and return its mask."""
        here, there = torch.arange(pairs, device=device)[:, None], torch.arange(pairs, device=device)
        done, self.passes = self.passes, self.passes + 1
        parts = [there <= here - done] + [there == here - done + m for m in range(1, done + 1)]
        own = torch.cat(parts, dim=1).expand(images, -1, -1)
        if self.prompt is None:
            return own
        return torch.cat([self.prompt[:, None].expand(-1, pairs, -1), own], dim=2)

    def write(
        self, layer: int, slots: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"]
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Store this pass of a layer and return all passes of that layer."""
        keys, values = self._kept.setdefault(layer, ([], []))
        for kept, now in zip((keys, values), fresh.transpose(1, 3).unbind(2), strict=True):
            kept.append(now)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)
