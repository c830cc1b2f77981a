"""LANTERN: a draft may claim the probability of its neighbours up to a fixed amount."""

from dataclasses import dataclass

from lantern.core.config import check_number
from lantern.verifiers.relaxations.neighbours import ClaimingRule


@dataclass(frozen=True, eq=False)
class Lantern(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest tokens that is <= delta.

    Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    arXiv:2410.03355. k = 0 or delta = 0 is exact decoding with residual "paper". delta bounds the mass that one
    test moves, not the total variation of the resulting token.
    ValueError for a value out of range.
    """

    k: int = 100
    delta: float | int = 0.1

    @property
    def bound(self) -> float:
        """delta."""
        return self.delta

    def __post_init__(self) -> None:
        self.check_residual()
        check_number("delta", self.delta, 0, 1)

    @property
    def constant(self) -> float:
        """delta."""
        return float(self.delta)
