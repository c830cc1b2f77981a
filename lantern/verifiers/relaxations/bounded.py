"""Bounded relaxation: p moves toward q between neighbouring tokens by at most delta, and is then verified exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import logs, probabilities
from lantern.verifiers.relaxations.neighbours import Neighbourhood
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed, check_number


@dataclass(frozen=True, eq=False)
class Bounded(Neighbourhood, Relaxation):
    """r = p + a flow of mass from tokens with p > q to tokens with q > p, computed before any child is tested.

    Mass moves from y to x only if y is one of the k nearest tokens of x. y gives at most p(y) - q(y). x takes at most
    q(x) - p(x), and r(x) is at most cap times p(x). A flow above delta is scaled down to delta. Hence r is a
    distribution, pointwise between p and q; TV(r, p) is the flow F <= delta; the acceptance probability of a single
    draft, sum min(r, q), rises by exactly F; a token with p(x) = 0 is never sampled. k = 0 or delta = 0 is exact.

    The flow is computed by `rounds` of proportional filling: x requests mass from its neighbours in proportion to what
    they have left, y grants in proportion to the requests. Only the `width` tokens with the largest deficit make
    requests; p and q alone determine them. The work is n width k; `width` = V is the dense form. At temperature 0 r is
    p; the greedy form there is LANTERN's (arXiv:2410.03355) with the budget min(delta, (cap - 1) p(x)).
    ValueError for a value out of range.
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
        p, q = probabilities(log_p), probabilities(log_q)
        gap = q.sub_(p)
        deficit = torch.minimum(gap, (self.cap - 1) * p).clamp_(min=0.0)
        lacks, takers = deficit.topk(min(self.width, p.shape[-1]), sorted=False)
        givers = self.neighbours(takers).flatten(1)
        inflow, outflow, travelled = self._fill(gap.neg_().clamp_(min=0.0), takers, lacks, givers)
        total = inflow.sum(-1)
        scale = (self.delta / total.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        kept = p.gather(1, givers) - outflow * scale[:, None]
        r = p.scatter(1, givers, kept).scatter_add_(1, takers, inflow * scale[:, None])
        # log(exp(x)) is not x to the last bit: tokens that did not change keep log p. Only neighbours and those that
        # request can change.
        tokens = torch.cat([givers, takers], 1)
        own, before = r.gather(1, tokens).clamp_(min=0.0), log_p.gather(1, tokens)
        log_r = log_p.scatter(1, tokens, torch.where(own == p.gather(1, tokens), before, logs(own)))
        spent = (total * scale).clamp(max=self.delta)
        return Relaxed(log_r, spent, None if travelled is None else travelled * scale)

    def _fill(
        self,
        surplus: Float[Tensor, "n v"],
        takers: Int[Tensor, "n w"],
        deficits: Float[Tensor, "n w"],
        givers: Int[Tensor, "n wk"],
    ) -> tuple[Float[Tensor, "n w"], Float[Tensor, "n wk"], Float[Tensor, " n"] | None]:
        """Run the rounds of proportional filling; return mass received and given, and moved mass times distance."""
        shape = (*takers.shape, self.k)
        away = None if self.distances is None else self.distances[takers, : self.k].to(surplus.dtype)
        lacks, travelled = deficits, None if away is None else torch.zeros_like(surplus[:, 0])
        own = left = surplus.gather(1, givers)
        for _ in range(self.rounds):
            around = left.view(shape).sum(-1)
            # x requests the same share from each neighbour, so one number per x is enough.
            share = (lacks / around.clamp(min=torch.finfo(surplus.dtype).tiny)).clamp_(max=1.0)
            spread = share[..., None].expand(shape).flatten(1)
            demand = torch.zeros_like(surplus).scatter_add_(1, givers, spread).gather(1, givers)
            offers = (left / demand.clamp(min=1.0)).view(shape)
            granted = torch.minimum(offers.sum(-1) * share, lacks)
            if away is not None and travelled is not None:
                travelled = travelled + ((offers * away).sum(-1) * share).sum(-1)
            lacks = lacks - granted
            left = left * (1.0 - demand).clamp_(min=0.0)
        return deficits - lacks, own - left, travelled
