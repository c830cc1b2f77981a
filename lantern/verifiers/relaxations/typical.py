"""Typical acceptance of Medusa: a draft is accepted if the target finds it probable enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.config import check_number
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, UnderTest


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
