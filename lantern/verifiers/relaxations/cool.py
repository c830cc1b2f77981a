"""COOL-SD: acceptance raised by a factor that anneals with draft depth, in the form of its output distribution."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import check_number
from lantern.core.sampling import logs
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed


@dataclass(frozen=True, eq=False)
class Cool(Relaxation):
    """The distribution that follows from accepting x with min(1, omega_i p(x) / q(x)), omega_i = omega exp(-nu i - mu).

    COOL-SD (AAAI 2026); i is the depth. mu makes omega the mean of omega_i over the depths of the draft. The rule's
    residual is norm(max(p - q f, 0)) with f the acceptance probability, so one draft from q gives
    r(x) = min(q, omega_i p) where q > p, and elsewhere p minus a common share of max(p - q, 0): a distribution between
    p and q. Here r replaces p and is verified exactly, by any verifier and with any number of siblings, at the same
    acceptance probability for one draft. Where omega_i <= 1 the published test rejects more often and its output still
    follows p: r is p.

    Total variation has the closed form sum max(min(q, omega_i p) - p, 0). The tokens that give mass and those that take
    it are independent of each other. Their root mean square distance, an upper bound of the mean distance, is reported
    as latent distance; None without `codebook`. ValueError for a value out of range.
    """

    omega: float | int = 1.1
    nu: float | int = 0.7
    codebook: Float[Tensor, "v d"] | None = None

    def __post_init__(self) -> None:
        check_number("omega", self.omega, 0, 1e6)
        check_number("nu", self.nu, 0, 10)

    def factors(self, levels: int) -> list[float]:
        """Return omega_i for each depth of a draft."""
        raw = [math.exp(-self.nu * depth) for depth in range(levels)]
        return [self.omega * value * levels / sum(raw) for value in raw]

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r, its total variation, and an upper bound of the latent distance."""
        p, q = log_p.exp(), log_q.exp()
        factor = torch.ones_like(p[:, :1])
        for depth, omega in enumerate(self.factors(levels)):
            factor = torch.where((depths == depth)[:, None], max(omega, 1.0), factor)
        taken = torch.minimum(q, factor * p).sub(p).clamp(min=0.0)
        surplus = (p - q).clamp(min=0.0)
        moved, whole = taken.sum(-1), surplus.sum(-1)
        share = (moved / whole.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        r = p + taken - surplus * share[:, None]
        log_r = torch.where(r == p, log_p, logs(r))
        distance = neighbours.root_mean_square(self.codebook, taken, surplus)
        return Relaxed(log_r, moved, None if distance is None else moved * distance)
