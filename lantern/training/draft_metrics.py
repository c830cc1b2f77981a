"""Quality of a drafter on held-out images: acceptance by depth, hit rates under Gumbel coupling, maps of acceptance."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.drafters.examples import Prediction
from lantern.training.losses import acceptance

WIDTHS = (1, 4, 8)
PIXELS = 8  # side of a token in a map


@dataclass(frozen=True)
class Draft:
    """A prediction with its distributions: p is the target's, q the drafter's."""

    predicted: Prediction
    p: Float[Tensor, "b m v"]
    log_q: Float[Tensor, "b m v"]


@torch.no_grad()
def measure(batches: Iterable[list[Draft]], tokens: int) -> dict[str, float]:
    """Return `accepted_i`, E[1 - TV] at depth i, and `hitsK_i`, how often the target's sample is among K drafts.

    The Gumbel noise of an image's tokens is the same at each depth and in each call.
    """
    generator, sums = torch.Generator().manual_seed(0), dict[str, list[Tensor]]()
    for drafts in batches:
        images, _, vocabulary = drafts[0].p.shape
        u = torch.rand(images, tokens, vocabulary, generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(u.clamp(1e-12, 1 - 1e-12))).float().to(drafts[0].p.device)
        for draft in drafts:
            depth, noise = draft.predicted.depth, gumbel[:, draft.predicted.places]
            sums.setdefault(f"accepted_{depth}", []).append(acceptance(draft.p, draft.log_q).flatten())
            sampled = (draft.p.log() + noise).argmax(-1, keepdim=True)
            ranked = (draft.log_q + noise).topk(min(WIDTHS[-1], noise.shape[-1]), dim=-1).indices
            for width in WIDTHS:
                hits = (ranked[..., :width] == sampled).any(-1).float()
                sums.setdefault(f"hits{width}_{depth}", []).append(hits.flatten())
    return {name: float(torch.cat(parts).mean()) for name, parts in sums.items()}


@torch.no_grad()
def maps(batches: Iterable[list[Draft]], tokens: int, columns: int) -> UInt8[Tensor, "d 3 h w"]:
    """Return acceptance over the grid, one image per depth: white is 1, tokens without a draft are black."""
    grids: dict[int, list[Tensor]] = {}
    for draft in (draft for drafts in batches for draft in drafts):
        grid = draft.p.new_zeros(len(draft.p), tokens)
        grid[:, draft.predicted.places] = acceptance(draft.p, draft.log_q)
        grids.setdefault(draft.predicted.depth, []).append(grid)
    means = torch.stack([torch.cat(parts).mean(0) for _, parts in sorted(grids.items())])
    wide = means.view(len(means), 1, -1, columns).repeat_interleave(PIXELS, 2).repeat_interleave(PIXELS, 3)
    return (wide * 255).round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous().cpu()
