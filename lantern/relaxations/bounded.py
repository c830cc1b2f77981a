"""Bounded relaxation: p moves toward q between neighbouring codes, by at most delta, and is then verified exactly."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.relaxations.neighbours import Neighbourhood
from lantern.types import Relaxed


@dataclass(frozen=True)
class Asked:
    """Who asks whom: `codes` with the largest deficits, how much each lacks, and its neighbours."""

    codes: Int[Tensor, "n w"]
    lacks: Float[Tensor, "n w"]
    near: Int[Tensor, "n wk"]


@dataclass(frozen=True)
class Flow:
    """Mass that arrived at the codes that asked, mass that every code still has to give, and mass times distance."""

    inflow: Float[Tensor, "n w"]
    surplus: Float[Tensor, "n v"]
    travelled: Float[Tensor, " n"] | None


@dataclass(frozen=True, eq=False)
class Bounded(Neighbourhood):
    """r = p + a flow of mass from codes with p > q onto codes with q > p, before any child is looked at.

    Mass goes from y to x only if y is one of the k nearest codes of x; y gives at most p(y) - q(y), x takes at most
    q(x) - p(x) and never more than cap times its p(x); a flow above delta is scaled down to it. Hence r is a law,
    pointwise between p and q; TV(r, p) is the flow F <= delta; the chance of a single draft, sum min(r, q), rises by
    exactly F; a code with p(x) = 0 is never drawn. k = 0 or delta = 0 is exact decoding.

    The flow comes of `rounds` of proportional filling: x asks its neighbours in proportion to what they have left, y
    grants in proportion to what it is asked. Only the `width` codes of largest deficit ask, which p and q alone
    decide: work is n width k, and `width` = V the dense form. At temperature 0 r is p; there the greedy form is
    LANTERN's (arXiv:2410.03355) with the budget min(delta, (cap - 1) p(x)).
    """

    k: int = 50
    delta: float | int = 0.2
    cap: float | int = 4.0
    rounds: int = 2
    width: int = 64

    def __post_init__(self) -> None:
        self.check_neighbours()
        if not math.isfinite(self.delta) or not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, wanted a probability from 0 (exact) to 1")
        if not math.isfinite(self.cap) or not 1 <= self.cap <= 1e6:
            raise ValueError(f"cap is {self.cap}, wanted a factor from 1 (exact) to 1e6")
        for name, value in (("rounds", self.rounds), ("width", self.width)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value}, wanted a whole number from 1 on")

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """min(delta, (cap - 1) p(x)), for the greedy form."""
        return ((self.cap - 1) * own).clamp(max=self.delta)

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Gives r with its total variation F, and the sum of flows times distances. Where nothing moves r is p."""
        p = log_p.exp()
        gap = log_q.exp() - p
        surplus = (-gap).clamp(min=0.0)
        wanted = torch.minimum(gap, (self.cap - 1) * p).clamp(min=0.0)
        largest = wanted.topk(min(self.width, p.shape[-1]), sorted=False)
        asked = Asked(largest.indices, largest.values, self.neighbours(largest.indices).flatten(1))
        flow = self._fill(surplus, asked)
        total = flow.inflow.sum(-1)
        scale = (self.delta / total.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        r = p - (surplus - flow.surplus) * scale[:, None]
        r = r.scatter_add(1, asked.codes, flow.inflow * scale[:, None]).clamp(min=0.0)
        # log(exp(x)) is not x to the last bit: what did not move keeps its own.
        log_r = torch.where(r == p, log_p, r.log())
        spent = (total * scale).clamp(max=self.delta)
        return Relaxed(log_r, spent, None if flow.travelled is None else flow.travelled * scale)

    def _fill(self, surplus: Float[Tensor, "n v"], asked: Asked) -> Flow:
        """Proportional filling."""
        shape = (*asked.codes.shape, self.k)
        away = None if self.distances is None else self.distances[asked.codes, : self.k].to(surplus.dtype)
        lacks, travelled = asked.lacks, None if away is None else torch.zeros_like(surplus[:, 0])
        for _ in range(self.rounds):
            around = surplus.gather(1, asked.near).view(shape).sum(-1)
            # Every neighbour is asked for the same share of what it has, so that one number says it.
            share = (lacks / around.clamp(min=torch.finfo(surplus.dtype).tiny)).clamp(max=1.0)
            spread = share[..., None].expand(shape).flatten(1)
            demand = torch.zeros_like(surplus).scatter_add(1, asked.near, spread)
            offers = (surplus / demand.clamp(min=1.0)).gather(1, asked.near).view(shape)
            granted = torch.minimum(offers.sum(-1) * share, lacks)
            if away is not None and travelled is not None:
                travelled = travelled + ((offers * away).sum(-1) * share).sum(-1)
            lacks = lacks - granted
            surplus = surplus * (1.0 - demand).clamp(min=0.0)
        return Flow(asked.lacks - lacks, surplus, travelled)
