"""LANTERN++: a draft may claim its neighbours' probability in proportion to its own."""

import math
from dataclasses import dataclass

from jaxtyping import Float, Int, Int32
from torch import Tensor

from lantern.relaxations import neighbours
from lantern.types import Moved


@dataclass(frozen=True, eq=False)
class LanternPP:
    """Accepts x with p(x) + the sum over the longest run of its k nearest codes that is <= (lambda_ - 1) p(x).

    Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
    Auto-regressive Models", arXiv:2502.06352: a relaxed probability is at most lambda_ p(x), so that a code the
    target finds improbable gains little. lambda_ = 1 is exact decoding with residual "paper".
    """

    table: Int32[Tensor, "v columns"]
    k: int = 10
    lambda_: float | int = 2.0
    residual: str = "paper"

    def __post_init__(self) -> None:
        neighbours.check_options(self.table, self.k, self.residual)
        if not math.isfinite(self.lambda_) or not 1 <= self.lambda_ <= 1e6:
            raise ValueError(f"lambda_ is {self.lambda_}, wanted a factor from 1 (exact) to 1e6")

    def neighbours(self, codes: Int[Tensor, "*n"]) -> Int[Tensor, "*n k"]:
        """The k nearest codes of each."""
        return self.table[codes, : self.k].long()

    def claim(self, own: Float[Tensor, "b n"], near: Float[Tensor, "b n k"]) -> Float[Tensor, "b n"]:
        """The neighbours' mass within (lambda_ - 1) times the code's own."""
        return neighbours.longest_prefix(near, (self.lambda_ - 1) * own)[1]

    def move(self, p: Float[Tensor, "b v"], codes: Int[Tensor, " b"]) -> Moved:
        """The neighbours' mass within (lambda_ - 1) times the code's own, and whose it is."""
        own = p.gather(1, codes[:, None])[:, 0]
        return neighbours.move(p, codes, self.neighbours(codes), (self.lambda_ - 1) * own)

    def refuse(
        self, p: Float[Tensor, "b v"], q: Float[Tensor, "b v"], codes: Int[Tensor, " b"], moved: Moved, is_point: bool
    ) -> Float[Tensor, "b v"]:
        """What is left of p after a refusal, not normalised."""
        if self.residual == "paper":
            return neighbours.refuse_as_published(p, q, codes, moved)
        around = self.table[codes, : self.k + 1].long()
        return neighbours.refuse_as_released(p, q, codes, around, moved, is_point=is_point)
