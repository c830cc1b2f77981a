"""Losses of drafters. p is the target's distribution, q the drafter's, after guidance and filters; one value per entry.

EAGLE (arXiv:2401.15077): feature regression and cross-entropy. LK losses: acceptance itself, a = sum min(p, q); it is
1 - TV(p, q), the probability that one sampled draft is kept.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

FLOOR = 1e-6  # lower bound of an acceptance before its logarithm


def feature_regression(predicted: Float[Tensor, "*n c"], expected: Float[Tensor, "*n c"]) -> Float[Tensor, "*n"]:
    """Return the smooth L1 distance between features, averaged over their axis."""
    return F.smooth_l1_loss(predicted.float(), expected.float(), reduction="none").mean(-1)


def soft_cross_entropy(p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """Return -sum p log q over the tokens with q > 0."""
    return -(p * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)


def acceptance(p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """Return a = sum min(p, q)."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def lk_alpha(p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """Return -log a."""
    return -acceptance(p, log_q).clamp(min=FLOOR).log()


def lk_lambda(
    p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"], *, scale: float = 1.0, decay: float = 3.0
) -> Float[Tensor, "*n"]:
    """Return w KL(p | q) + (1 - w) (1 - a), w = scale exp(-decay a): the divergence dominates at low acceptance.

    The divergence is summed over tokens with q > 0; w has no gradient.
    """
    accepted = acceptance(p, log_q)
    share = scale * (-decay * accepted.detach()).exp()
    entropy = -torch.special.xlogy(p, p).masked_fill(log_q == -torch.inf, 0.0).sum(-1)
    return share * (soft_cross_entropy(p, log_q) - entropy) + (1 - share) * (1 - accepted)


@dataclass(frozen=True)
class Objective:
    """Weights of the losses of a draft. Depth i has weight `fade`**(i - 1).

    `form` is the LK loss that `acceptance` weighs: "alpha" or "lambda" (with `kl_scale`, `kl_decay`).
    ValueError for values out of range.
    """

    acceptance: float = 1.0
    cross_entropy: float = 0.1
    regression: float = 0.1
    fade: float = 0.8
    form: Literal["alpha", "lambda"] = "alpha"
    kl_scale: float = 1.0
    kl_decay: float = 3.0

    def __post_init__(self) -> None:
        if min(self.acceptance, self.cross_entropy, self.regression) < 0 or not (
            self.acceptance or self.cross_entropy or self.regression
        ):
            raise ValueError("acceptance, cross_entropy and regression are weights: wanted none below 0 and one above")
        if self.fade <= 0 or self.kl_decay < 0 or not 0 < self.kl_scale <= 1:
            raise ValueError("wanted fade above 0, kl_decay from 0, kl_scale above 0 and at most 1")

    def of_distributions(self, p: Float[Tensor, "*n v"], log_q: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
        """Return the loss of the drafter's distribution."""
        loss = torch.zeros_like(p[..., 0])
        if self.acceptance:
            scale, decay = self.kl_scale, self.kl_decay
            lk = lk_alpha(p, log_q) if self.form == "alpha" else lk_lambda(p, log_q, scale=scale, decay=decay)
            loss = loss + self.acceptance * lk
        if self.cross_entropy:
            loss = loss + self.cross_entropy * soft_cross_entropy(p, log_q)
        return loss
