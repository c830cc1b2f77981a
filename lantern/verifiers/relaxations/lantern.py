"""LANTERN: a draft may claim the probability of its neighbours up to a fixed amount."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.methods.spec import MethodSpec, Setting
from lantern.verifiers.relaxations.neighbours import RESIDUAL, ClaimingRule


@dataclass(frozen=True, eq=False)
class Lantern(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest codes that is <= delta.

    Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    arXiv:2410.03355. k = 0 or delta = 0 is exact decoding with residual "paper". delta bounds the mass that one
    test moves, not the total variation of the resulting code.
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
        if not math.isfinite(self.delta) or not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, wanted a probability from 0 to 1")

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return delta, independent of the code's own probability."""
        return torch.full_like(own, self.delta)


DELTA = Setting(
    "delta", 0.1, "largest probability that a draft claims from others", low=0, high=1, sweep=(0.05, 0.1, 0.2)
)
SHARED = Setting("shared", False, "whether the siblings of a node share one delta; as published each has its own")
METHODS = (
    MethodSpec(
        "lantern",
        "relaxed: a draft may claim its k nearest codes' probability up to delta",
        "eagle",
        drafter="lantern.drafters.eagle.drafter:build",
        tree="grown_8_2",
        mode="sampled",
        verifier="rejection",
        relaxation=Lantern,
        settings=(
            Setting("k", 100, "nearest codes that count as alike; 0 is exact", low=0, high=1024),
            DELTA,
            RESIDUAL,
        ),
        add_ons=("eagle1",),
        paper="2410.03355",
    ),
    MethodSpec(
        "lantern-paper",
        "relaxed: LANTERN as published: EAGLE-2's tree of 58 most likely nodes, k 1000, the released residual",
        "eagle",
        drafter="lantern.drafters.eagle.dynamic:build",
        policy="lantern.drafters.policies.eagle2:Eagle2",
        mode="point",
        verifier="rejection",
        relaxation=Lantern,
        settings=(
            Setting("nodes", 58, "drafted nodes of a tree", low=1),
            Setting("width", 10, "nodes that are extended at each depth", low=1),
            Setting("depth", 5, "depth of a tree", low=1, high=12),
            Setting("k", 1000, "nearest codes that count as alike; 0 is exact", low=0, high=1023),
            DELTA,
            dataclasses.replace(RESIDUAL, default="released"),
            SHARED,
        ),
        add_ons=("eagle1",),
        paper="2410.03355",
        page="lantern",
    ),
)
