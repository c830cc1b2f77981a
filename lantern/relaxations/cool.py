"""COOL-SD: acceptance raised by a factor that anneals with the depth of the draft, as the law that it emits."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.types import Relaxed


@dataclass(frozen=True, eq=False)
class Cool:
    """The law of accepting x with min(1, omega_i p(x) / q(x)), where omega_i = omega exp(-nu i - mu) at depth i.

    COOL-SD (AAAI 2026). mu makes omega the mean of omega_i over the depths of the draft. The rule's residual is
    norm(max(p - q f, 0)) with f the chance of acceptance, so one draft from q emits r(x) = min(q, omega_i p) where
    q > p, and elsewhere p less a common share of max(p - q, 0): a law between p and q. Here that law takes p's place
    and is verified exactly, by any verifier and with any number of siblings, at the same chance for one draft. Where
    omega_i <= 1 the published test refuses more and still emits p: r is p.

    Total variation is closed: sum max(min(q, omega_i p) - p, 0). The codes that give and those that take are
    independent of each other; their root mean square distance, a bound of the mean one, is what is reported as latent
    distance, None without `codebook`.
    """

    omega: float | int = 1.1
    nu: float | int = 0.7
    codebook: Float[Tensor, "v d"] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.omega) or not 0 <= self.omega <= 1e6:
            raise ValueError(f"omega is {self.omega}, wanted a factor from 0 to 1e6")
        if not math.isfinite(self.nu) or not 0 <= self.nu <= 10:
            raise ValueError(f"nu is {self.nu}, wanted a rate from 0 (not annealed) to 10")

    def factors(self, levels: int) -> list[float]:
        """omega_i for each depth of a draft."""
        raw = [math.exp(-self.nu * depth) for depth in range(levels)]
        return [self.omega * value * levels / sum(raw) for value in raw]

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Gives r with its total variation, and a bound of the latent distance."""
        p, q = log_p.exp(), log_q.exp()
        factor = torch.ones_like(p[:, :1])
        for depth, omega in enumerate(self.factors(levels)):
            factor = torch.where((depths == depth)[:, None], max(omega, 1.0), factor)
        taken = torch.minimum(q, factor * p).sub(p).clamp(min=0.0)
        surplus = (p - q).clamp(min=0.0)
        moved, whole = taken.sum(-1), surplus.sum(-1)
        share = (moved / whole.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        r = p + taken - surplus * share[:, None]
        log_r = torch.where(r == p, log_p, r.clamp(min=0.0).log())
        if self.codebook is None:
            return Relaxed(log_r, moved)
        return Relaxed(log_r, moved, moved * self._root_mean_square(taken, surplus))

    def _root_mean_square(self, takers: Float[Tensor, "n v"], givers: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
        """Of the L2 distance between two codes drawn independently in proportion to these."""
        assert self.codebook is not None
        vectors = self.codebook.to(takers.dtype)
        laws = [law / law.sum(-1, keepdim=True).clamp(min=torch.finfo(law.dtype).tiny) for law in (takers, givers)]
        middle = (laws[0] - laws[1]) @ vectors
        squares = vectors.square().sum(-1)
        spread = [law @ squares - (law @ vectors).square().sum(-1) for law in laws]
        return (middle.square().sum(-1) + spread[0] + spread[1]).clamp(min=0.0).sqrt()
