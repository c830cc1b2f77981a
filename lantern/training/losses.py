"""Losses and held-out figures of drafters: p is the target's distribution, q the drafter's, after guidance and filters.

EAGLE (arXiv:2401.15077): feature regression and cross-entropy. LK losses: acceptance itself, a = sum min(p, q); it is
1 - TV(p, q), the probability that one sampled draft is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.drafters.base import Examples, Prediction

FLOOR = 1e-6  # lower bound of an acceptance before its logarithm
WIDTHS = (1, 4, 8)  # numbers of drafts in hit rates
PIXELS = 8  # side of a token in a map


def feature_regression(predicted: Float[Tensor, "*n c"], expected: Float[Tensor, "*n c"]) -> Float[Tensor, "*n"]:
    """Return the smooth L1 distance between features, averaged over their axis."""
    return F.smooth_l1_loss(predicted.float(), expected.float(), reduction="none").mean(-1)


def acceptance(p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """Return a = sum min(p, q)."""
    return torch.minimum(p, log_q.exp()).sum(-1)


@dataclass(frozen=True)
class Draft:
    """A prediction with its distributions: p is the target's, q the drafter's."""

    predicted: Prediction
    p: Float[Tensor, "b m v"]
    log_q: Float[Tensor, "b m v"]


@dataclass(frozen=True)
class Objective:
    """Weights of the losses of a draft: -log a, cross-entropy, feature regression. Depth i has weight `fade`**(i - 1).

    ValueError for values out of range.
    """

    acceptance: float = 1.0
    cross_entropy: float = 0.1
    regression: float = 0.1
    fade: float = 0.8

    def __post_init__(self) -> None:
        weights = (self.acceptance, self.cross_entropy, self.regression)
        if min(weights) < 0 or not any(weights):
            raise ValueError("acceptance, cross_entropy and regression are weights: wanted none below 0 and one above")
        if self.fade <= 0:
            raise ValueError(f"fade is {self.fade}, wanted above 0")

    def of(self, draft: Draft, examples: Examples) -> Float[Tensor, "b m"]:
        """Return one value per entry: -log a, -sum p log q over the tokens with q > 0, and feature regression."""
        p, log_q, predicted = draft.p, draft.log_q, draft.predicted
        loss = torch.zeros_like(p[..., 0])
        if self.acceptance:
            loss = loss - self.acceptance * acceptance(p, log_q).clamp(min=FLOOR).log()
        if self.cross_entropy:
            loss = loss - self.cross_entropy * (p * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
        if self.regression and predicted.features is not None:
            loss = loss + self.regression * feature_regression(predicted.features, examples.guided[:, predicted.places])
        if self.regression and predicted.rows is not None:
            apart = feature_regression(predicted.rows, examples.rows[:, :, predicted.places])
            loss = loss + self.regression * apart.mean(1)
        return loss


@torch.no_grad()
def measure(batches: Iterable[list[Draft]], tokens: int) -> dict[str, float]:
    """Return `accepted_i`, E[1 - TV] at depth i, `hitsK_i`, how often the target's sample is among K drafts, and
    `tokens`, 1 + a_1 + a_1 a_2 + ..., those of a step with one draft a depth, if they are accepted alike everywhere.

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
    found = {name: float(torch.cat(parts).mean()) for name, parts in sums.items()}
    accepted = [found[name] for name in sums if name.startswith("accepted_")]
    return {"tokens": 1 + sum(accumulate(accepted, mul)), **found}


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
