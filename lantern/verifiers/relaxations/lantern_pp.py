"""LANTERN++: a draft may claim the probability of its neighbours in proportion to its own."""

from dataclasses import dataclass

from lantern.core.config import check_number
from lantern.verifiers.relaxations.neighbours import ClaimingRule


@dataclass(frozen=True, eq=False)
class LanternPP(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest tokens that is <= (lambda_ - 1) p(x).

    Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
    Auto-regressive Models", arXiv:2502.06352: a relaxed probability is at most lambda_ p(x), so that an
    improbable token gains little. lambda_ = 1 is exact decoding with residual "paper".
    ValueError for a value out of range.
    """

    lambda_: float | int = 2.0

    def __post_init__(self) -> None:
        self.check_residual()
        check_number("lambda_", self.lambda_, 1, 1e6)

    @property
    def factor(self) -> float:
        """lambda_ - 1."""
        return float(self.lambda_ - 1)
