"""Relaxed distributions, which are verified exactly: bounded relaxation, mixtures, COOL-SD, verification skipping."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.config import check_number
from lantern.core.sampling import COARSE, UNITS, logs, rounded_exp, rounded_log, whole_units
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.neighbours import Neighbourhood
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed

MAX_SKIP = 32  # tokens


@dataclass(frozen=True, eq=False)
class Bounded(Neighbourhood, Relaxation):
    """Bounded relaxation: p moves toward q between neighbouring tokens, by at most delta.

    r = p + a flow of mass from tokens with p > q to tokens with q > p, computed before any child is tested. Mass moves
    from y to x only if y is one of the k nearest tokens of x. y gives at most p(y) - q(y). x takes at most q(x) - p(x),
    and r(x) is at most cap times p(x). A flow above delta is scaled down to delta. Hence r is a distribution, pointwise
    between p and q; TV(r, p) is the flow F <= delta; the acceptance probability of a single draft, sum min(r, q), rises
    by exactly F; a token with p(x) = 0 is never sampled. k = 0 or delta = 0 is exact.

    The flow is computed by `rounds` of proportional filling: x requests mass from its neighbours in proportion to what
    they have left, y grants in proportion to the requests. Only the `width` tokens with the largest deficit make
    requests, the lowest index first among equals; p and q alone determine them. The work is n width k; `width` = V is
    the dense form. Masses are whole units of 2^-48 in fp64, deficits and shares of 2^-36, so that neither the order of
    a sum nor the processor changes r.

    At temperature 0 r is p; the greedy form there is LANTERN's (arXiv:2410.03355) with the budget min(delta, (cap - 1)
    p(x)). ValueError for a value out of range.
    """

    k: int = 50
    delta: float | int = 0.2
    cap: float | int = 4.0
    rounds: int = 2
    width: int = 64

    def __post_init__(self) -> None:
        self.check_neighbours()
        check_number("delta", self.delta, 0, 1)
        check_number("cap", self.cap, 1, 1e6)
        check_number("rounds", self.rounds, 1, kind=int)
        check_number("width", self.width, 1, kind=int)

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return min(delta, (cap - 1) p(x)), the budget of the greedy form."""
        return ((self.cap - 1) * own).clamp(max=self.delta)

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r, its total variation F, and the sum of flows times distances. Where nothing moves r is p."""
        p, q = rounded_exp(log_p), whole_units(rounded_exp(log_q))
        own = whole_units(p)
        gap = q.sub_(own)
        deficit = torch.minimum(gap, (self.cap - 1) * own).clamp_(min=0.0).mul_(COARSE / UNITS).floor_()
        takers = self._largest(deficit)
        givers, lacks = self.neighbours(takers).flatten(1), deficit.gather(1, takers) * (UNITS / COARSE)
        inflow, outflow, travelled = self._fill(gap.neg_().clamp_(min=0.0), takers, lacks, givers)
        total = inflow.sum(-1)
        scale = (self.delta * UNITS / total.clamp(min=1.0)).clamp(max=1.0)
        lost, gained = ((part * scale[:, None]).floor_() for part in (outflow, inflow))
        change = torch.zeros_like(gap).scatter_(1, givers, lost.neg_()).scatter_add_(1, takers, gained)
        # log(exp(x)) is not x to the last bit: tokens that did not change keep log p. Only neighbours and those that
        # request can change.
        tokens = torch.cat([givers, takers], 1)
        moved, before = change.gather(1, tokens), log_p.gather(1, tokens)
        r = (p.gather(1, tokens) + moved / UNITS).to(p.dtype).clamp_(min=torch.finfo(p.dtype).tiny)
        log_r = log_p.scatter(1, tokens, torch.where(moved == 0, before, rounded_log(r)))
        spent = ((total * scale).floor_() / UNITS).to(p.dtype).clamp_(max=self.delta)
        return Relaxed(log_r, spent, None if travelled is None else (travelled * scale / COARSE).to(p.dtype))

    def _largest(self, deficit: Float64[Tensor, "n v"]) -> Int[Tensor, "n w"]:
        """Return the tokens with the largest deficits, those of the lowest index among equals."""
        size = deficit.shape[-1]
        ahead = torch.arange(size - 1, -1, -1, device=deficit.device)
        return (deficit * size + ahead).topk(min(self.width, size), sorted=False).indices

    def _fill(
        self,
        surplus: Float64[Tensor, "n v"],
        takers: Int[Tensor, "n w"],
        deficits: Float64[Tensor, "n w"],
        givers: Int[Tensor, "n wk"],
    ) -> tuple[Float64[Tensor, "n w"], Float64[Tensor, "n wk"], Float64[Tensor, " n"] | None]:
        """Run the rounds of proportional filling; return mass received and given, and moved mass times distance."""
        shape = (*takers.shape, self.k)
        away = None if self.distances is None else self.distances[takers, : self.k].double()
        lacks, travelled = deficits, None if away is None else torch.zeros_like(surplus[:, 0])
        own = left = surplus.gather(1, givers)
        for _ in range(self.rounds):
            around = left.view(shape).sum(-1)
            # x requests the same share from each neighbour, so one number per x is enough.
            share = whole_units((lacks / around.clamp(min=1.0)).clamp_(max=1.0), COARSE)
            spread = share[..., None].expand(shape).flatten(1)
            demand = torch.zeros_like(surplus).scatter_add_(1, givers, spread).gather(1, givers) / COARSE
            share = share / COARSE
            offers = (left / demand.clamp(min=1.0)).floor_().view(shape)
            granted = torch.minimum((offers.sum(-1) * share).floor_(), lacks)
            if away is not None and travelled is not None:
                moved = (offers * away * (COARSE / UNITS)).floor_().sum(-1)
                travelled = travelled + (moved * share).floor_().sum(-1)
            lacks = lacks - granted
            left = (left * (1.0 - demand).clamp_(min=0.0)).floor_()
        return deficits - lacks, own - left, travelled


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


@dataclass(frozen=True, eq=False)
class Cool(Relaxation):
    """The distribution that follows from accepting x with min(1, omega_i p(x) / q(x)), omega_i = omega exp(-nu i - mu).

    COOL-SD (arXiv:2601.09212, AAAI 2026): acceptance raised by a factor that anneals with draft depth. i is the depth.
    mu makes omega the mean of omega_i over the depths of the draft. The rule's residual is norm(max(p - q f, 0)) with f
    the acceptance probability, so one draft from q gives r(x) = min(q, omega_i p) where q > p, and elsewhere p minus a
    common share of max(p - q, 0): a distribution between p and q. Here r replaces p and is verified exactly, by any
    verifier and with any number of siblings, at the same acceptance probability for one draft. Where omega_i <= 1 the
    published test rejects more often and its output still follows p: r is p.

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
        return Relaxed(log_r, moved, neighbours.distance_moved(self.codebook, taken, surplus))


@dataclass(frozen=True, eq=False)
class Vvs(Relaxation):
    """Verification skipping: the first tokens of a step are committed as the drafter sampled them.

    r = q, the drafter's distribution, where depth < skip, else p. Dong et al., "VVS", arXiv:2511.13587. A step without
    verification commits L tokens of a draft path, and the next step drafts behind them and verifies. Both are one pass
    here: its tree begins with a chain of L tokens that are not tested, and the tree behind them is. With `skip` 0 it is
    exact.

    The mass that q has in excess comes from that which p has in excess, independently of it. The root mean square
    distance of both, an upper bound of the mean distance, is reported as latent distance; None without `codebook`.
    ValueError for a value out of range.
    """

    skip: int = 1
    codebook: Float[Tensor, "v d"] | None = None

    def __post_init__(self) -> None:
        check_number("skip", self.skip, 0, MAX_SKIP, kind=int)

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r, its total variation (0 where tokens are tested), and an upper bound of the latent distance."""
        is_skipped = depths < self.skip
        change = (log_q.exp() - log_p.exp()).masked_fill(~is_skipped[:, None], 0.0)
        moved = change.abs().sum(-1) / 2
        log_r = torch.where(is_skipped[:, None], log_q, log_p)
        distance = neighbours.distance_moved(self.codebook, change.clamp(min=0.0), (-change).clamp(min=0.0))
        return Relaxed(log_r, moved, distance)
