"""Tolerant sampling: a draft is accepted if it is among several draws of the target."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.relaxations import neighbours
from lantern.types import Ruling, Trial


@dataclass(frozen=True, eq=False)
class Tolerance:
    """Accepts x if it is among `samples` independent draws from p; if none of the drafts is, the first draw counts.

    The tolerance of VADUSA (speech decoding), in the form that its name suggests: the paper's own definition was not
    at hand. The draws need not be made: x is among them with probability 1 - (1 - p(x))^samples, and draws of which
    none is x are independent draws from p without x. samples = 1 is exact decoding. q is not read, so drafts are judged
    as point drafts. Given the draft, a test moves (1 - (1 - p(x))^samples) - p(x) onto x: a closed form.
    """

    samples: int = 2
    codebook: Float[Tensor, "v d"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or isinstance(self.samples, bool) or not 1 <= self.samples <= 10**6:
            raise ValueError(f"samples is {self.samples}, wanted a whole number from 1 (exact) to 10**6")

    @property
    def modes(self) -> frozenset[str]:
        """Point drafts."""
        return frozenset({"point"})

    def judge(self, trial: Trial) -> Ruling:
        """Tests x against the draws that could have been made."""
        own = trial.own_p
        chance = own if self.samples == 1 else -torch.expm1(self.samples * torch.log1p(-own.clamp(max=1.0)))
        left = trial.p.scatter(1, trial.codes[:, None], 0.0)
        if self.codebook is None:
            return Ruling(chance, left)
        return Ruling(chance, left, neighbours.mean_distance(self.codebook, trial.codes, left))
