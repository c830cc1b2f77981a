"""LANTERN: a draft may claim its neighbours' probability up to a fixed amount."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from lantern.relaxations import neighbours
from lantern.types import Moved


@dataclass(frozen=True, eq=False)
class Lantern:
    """Accepts x with p(x) + the sum over the longest run of its k nearest codes that is <= delta.

    Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    arXiv:2410.03355. `residual` says what is left after a refusal: "paper", or "released" for the authors' code.
    k = 0 or delta = 0 is exact decoding with residual "paper".
    """

    table: Int32[Tensor, "v columns"]
    k: int = 100
    delta: float | int = 0.1
    residual: str = "paper"

    def __post_init__(self) -> None:
        neighbours.check_options(self.table, self.k, self.residual)
        if not math.isfinite(self.delta) or not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, wanted a probability from 0 to 1")

    def neighbours(self, codes: Int[Tensor, "*n"]) -> Int[Tensor, "*n k"]:
        """The k nearest codes of each."""
        return self.table[codes, : self.k].long()

    def claim(self, own: Float[Tensor, "b n"], near: Float[Tensor, "b n k"]) -> Float[Tensor, "b n"]:
        """The neighbours' mass within delta."""
        return neighbours.longest_prefix(near, torch.full_like(own, self.delta))[1]

    def move(self, p: Float[Tensor, "b v"], codes: Int[Tensor, " b"]) -> Moved:
        """The neighbours' mass within delta, and whose it is."""
        return neighbours.move(p, codes, self.neighbours(codes), torch.full_like(p[:, 0], self.delta))

    def refuse(
        self, p: Float[Tensor, "b v"], q: Float[Tensor, "b v"], codes: Int[Tensor, " b"], moved: Moved, is_point: bool
    ) -> Float[Tensor, "b v"]:
        """What is left of p after a refusal, not normalised."""
        if self.residual == "paper":
            return neighbours.refuse_as_published(p, q, codes, moved)
        around = self.table[codes, : self.k + 1].long()
        return neighbours.refuse_as_released(p, q, codes, around, moved, is_point=is_point)
