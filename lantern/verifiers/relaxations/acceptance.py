"""Relaxed tests of single tokens without neighbours: grouped speculative decoding, tolerance, typical acceptance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.config import check_number
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, UnderTest


@dataclass(frozen=True, eq=False)
class Grouped(Acceptance):
    """Accept x with probability min(1, sum p / sum q), sums over the group of x; a rejection leaves max(p - q, 0).

    So et al., "Grouped Speculative Decoding for Autoregressive Image Generation" (ICCV 2025). The group of x is x
    and the group / 2 tokens on each side of it in the order of p, without those whose p differs by `p_radius` or more
    or whose vector is `d_radius` or farther away. group = 0 is exact decoding. The output distribution has a closed
    form for one draft only; `RejectionVerifier` defines what is reported as total variation.
    ValueError for a value out of range.
    """

    codebook: Float[Tensor, "v d"]
    group: int = 14
    p_radius: float | int = 0.15
    d_radius: float | int = 0.5

    def __post_init__(self) -> None:
        check_number("group", self.group, 0, kind=int)
        if self.group % 2:
            raise ValueError(f"group is {self.group}, wanted an even number of tokens")
        check_number("p_radius", self.p_radius, 0)
        check_number("d_radius", self.d_radius, 0)

    def judge(self, trial: UnderTest) -> Ruling:
        """Test x with the mass of its group."""
        order = trial.p.argsort(dim=1, descending=True, stable=True)
        place = (order == trial.tokens[:, None]).long().argmax(1, keepdim=True)
        around = torch.arange(-(self.group // 2), self.group // 2 + 1, device=order.device)
        window = place + around
        near = order.gather(1, window.clamp(0, order.shape[1] - 1))
        own_p, p, q = trial.own_p[:, None], trial.p.gather(1, near), trial.q.gather(1, near)
        away = (self.codebook[near].to(p.dtype) - self.codebook[trial.tokens][:, None]).norm(dim=-1)
        is_alike = ((p - own_p).abs() < self.p_radius) & (away < self.d_radius)
        is_in = (window >= 0) & (window < order.shape[1]) & (is_alike | (around == 0))
        tiny = torch.finfo(q.dtype).tiny  # for tokens with q = 0, which are never tested
        sums = torch.where(is_in, p, 0.0).sum(1) / torch.where(is_in, q, 0.0).sum(1).clamp(min=tiny)
        # A group of one gives exact decoding's test, bit for bit.
        mass = torch.where(is_in.sum(1) == 1, own_p[:, 0], sums * trial.own_q)
        left = (trial.p - trial.q).clamp(min=0.0)
        return Ruling(mass, left, neighbours.mean_distance(self.codebook, trial.tokens, left))


@dataclass(frozen=True, eq=False)
class Tolerance(Acceptance):
    """Accept x if it is among `samples` independent samples of p; if no draft is, the first sample is the token.

    The tolerance of VADUSA (speech decoding), in the form that its name suggests: the paper's own definition was not
    available. The samples are not made: x is among them with probability 1 - (1 - p(x))^samples, and samples without x
    are independent samples of p without x. samples = 1 is exact decoding. q is not read, so drafts are tested as point
    drafts. Given the draft, a test moves (1 - (1 - p(x))^samples) - p(x) onto x, in closed form.
    ValueError for a value out of range.
    """

    samples: int = 2
    codebook: Float[Tensor, "v d"] | None = None
    modes: ClassVar[frozenset[str]] = frozenset({"point"})

    def __post_init__(self) -> None:
        check_number("samples", self.samples, 1, 10**6, kind=int)

    def judge(self, trial: UnderTest) -> Ruling:
        """Test x against the samples, without making them."""
        own = trial.own_p
        chance = own if self.samples == 1 else -torch.expm1(self.samples * torch.log1p(-own.clamp(max=1.0)))
        left = trial.p.scatter(1, trial.tokens[:, None], 0.0)
        return Ruling(chance, left, neighbours.mean_distance(self.codebook, trial.tokens, left))


@dataclass(frozen=True, eq=False)
class Typical(Acceptance):
    """Accept x if p(x) > min(epsilon, alpha exp(-H(p))), with H the entropy in nats; a rejection leaves p as it is.

    Cai et al., "Medusa", arXiv:2401.10774, section 2.3.1. q is not read, so drafts are tested as point drafts. The
    token after the last accepted one, the first of the next step, is the likeliest of p and is not tested, as
    published. epsilon = 1 and alpha large accept nothing but tokens of probability 1 and are greedy decoding.
    ValueError for a value out of range.
    """

    epsilon: float | int = 0.09
    alpha: float | int = 0.3
    codebook: Float[Tensor, "v d"] | None = None
    modes: ClassVar[frozenset[str]] = frozenset({"point"})
    takes_best: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, 0)
        check_number("alpha", self.alpha, 0)

    def judge(self, trial: UnderTest) -> Ruling:
        """Accept x for certain or not at all."""
        entropy = torch.special.entr(trial.p).sum(1)
        bar = (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)
        mass = (trial.own_p > bar).to(trial.p.dtype)
        return Ruling(mass, trial.p, neighbours.mean_distance(self.codebook, trial.tokens, trial.p))
