"""Tolerant sampling: a draft is accepted if it is among several samples of the target."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.config import check_number
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, UnderTest


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
