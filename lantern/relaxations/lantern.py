"""LANTERN: a draft may claim its neighbours' probability up to a fixed amount."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.relaxations.neighbours import ClaimingRule


@dataclass(frozen=True, eq=False)
class Lantern(ClaimingRule):
    """Accepts x with p(x) + the sum over the longest run of its k nearest codes that is <= delta.

    Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    arXiv:2410.03355. k = 0 or delta = 0 is exact decoding with residual "paper". delta bounds what one test moves, not
    the total variation of the code that comes of it: `lantern.eval.price` tables both.
    """

    k: int = 100
    delta: float | int = 0.1

    def __post_init__(self) -> None:
        self.check_residual()
        if not math.isfinite(self.delta) or not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, wanted a probability from 0 to 1")

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """delta, whatever the code's own probability."""
        return torch.full_like(own, self.delta)
