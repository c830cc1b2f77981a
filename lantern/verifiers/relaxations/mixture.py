"""Mixture of p and q: p moves toward q by at most delta, whatever the tokens, and is then verified exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import check_number
from lantern.core.sampling import UNITS, rounded_exp, rounded_log, whole_units
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed


@dataclass(frozen=True, eq=False)
class Mixture(Relaxation):
    """r = p + w (q - p), with the largest w up to 1 for which TV(r, p) <= delta.

    TV(r, p) is known before any child is tested, and the acceptance probability of a single draft, sum min(r, q), rises
    by exactly that much: no distribution within delta of p is accepted more often. A token x gains at most
    (cap - 1) p(x), so that one with p(x) = 0 is never sampled; what the others lose is scaled to what is gained, and r
    lies between p and q at every token. delta = 0 or cap = 1 is exact. Tokens need not be neighbours, as in `Bounded`.

    Masses are whole units of 2^-48 in fp64, so that r depends neither on the order of a sum nor on the processor: the
    C++ engine computes the same bits. ValueError for a value out of range.
    """

    delta: float | int = 0.15
    cap: float | int = 1e6

    def __post_init__(self) -> None:
        check_number("delta", self.delta, 0, 1)
        check_number("cap", self.cap, 1, 1e6)

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r and its total variation; where nothing moves r is p. There is no latent distance."""
        p = rounded_exp(log_p)
        own = whole_units(p)
        gap = whole_units(rounded_exp(log_q)).sub_(own)
        gained = torch.minimum(gap, (self.cap - 1) * own).clamp_(min=0.0).floor_()
        lost = gap.neg_().clamp_(min=0.0)
        total = gained.sum(-1, keepdim=True)
        scale = (self.delta * UNITS / total.clamp(min=1.0)).clamp_(max=1.0)
        share = (total * scale / lost.sum(-1, keepdim=True).clamp_(min=1.0)).clamp_(max=1.0)
        moved = gained.mul_(scale).floor_().sub_(lost.mul_(share).floor_())
        r = (p + moved / UNITS).to(p.dtype).clamp_(min=torch.finfo(p.dtype).tiny)
        # log(exp(x)) is not x to the last bit: tokens that did not change keep log p
        log_r = torch.where(moved == 0, log_p, rounded_log(r))
        return Relaxed(log_r, ((total * scale).floor_() / UNITS).to(p.dtype).clamp_(max=self.delta)[:, 0])
