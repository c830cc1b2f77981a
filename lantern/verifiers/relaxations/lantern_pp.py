"""LANTERN++: a draft may claim the probability of its neighbours in proportion to its own."""

import dataclasses
import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from lantern.methods.spec import MethodSpec, Setting
from lantern.verifiers.relaxations.neighbours import RESIDUAL, ClaimingRule


@dataclass(frozen=True, eq=False)
class LanternPP(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest codes that is <= (lambda_ - 1) p(x).

    Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
    Auto-regressive Models", arXiv:2502.06352: a relaxed probability is at most lambda_ p(x), so that an
    improbable code gains little. lambda_ = 1 is exact decoding with residual "paper".
    ValueError for a value out of range.
    """

    lambda_: float | int = 2.0

    def __post_init__(self) -> None:
        self.check_residual()
        if not math.isfinite(self.lambda_) or not 1 <= self.lambda_ <= 1e6:
            raise ValueError(f"lambda_ is {self.lambda_}, wanted a factor from 1 (exact) to 1e6")

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return (lambda_ - 1) times the code's own probability."""
        return (self.lambda_ - 1) * own


LAMBDA = Setting(
    "lambda_",
    2.0,
    "largest factor by which a draft's probability grows; 1 is exact",
    low=1,
    high=1e6,
    sweep=(1.5, 2.0, 3.0, 5.0),
)
METHODS = (
    MethodSpec(
        "lantern++",
        "relaxed: a draft may claim its k nearest codes' probability up to (lambda - 1) times its own",
        "eagle",
        drafter="lantern.drafters.eagle.drafter:build",
        tree="grown_8_2",
        mode="sampled",
        verifier="rejection",
        relaxation=LanternPP,
        settings=(
            Setting("k", 10, "nearest codes that count as alike; 0 is exact", low=0, high=1024),
            LAMBDA,
            RESIDUAL,
        ),
        add_ons=("eagle1",),
        paper="2502.06352",
        page="lantern-pp",
    ),
    MethodSpec(
        "lantern++-paper",
        "relaxed: LANTERN++ as published: the static tree of 57 nodes, k 10, lambda 5, the released residual",
        "eagle",
        drafter="lantern.drafters.eagle.drafter:build",
        tree="naive_extend_57",
        mode="sampled",
        verifier="rejection",
        relaxation=LanternPP,
        settings=(
            Setting("k", 10, "nearest codes that count as alike; 0 is exact", low=0, high=1023),
            dataclasses.replace(LAMBDA, default=5.0),
            dataclasses.replace(RESIDUAL, default="released"),
        ),
        add_ons=("eagle1",),
        paper="2502.06352",
        page="lantern-pp",
    ),
)
