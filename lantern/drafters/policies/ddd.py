"""DDD, dynamic depth decoding: drafting stops when little probability is left in the beam (arXiv:2409.00142)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lantern.drafters.policies.policy import Layer, Pool, StoppingPolicy, not_stopped


@dataclass
class Ddd(StoppingPolicy):
    """EAGLE-2's beam, stopped where the probability that any of its paths matches the target is small.

    H = log sum exp of the beam's reach, checked from depth `check` on; below log `alive` an image drafts no deeper. The
    paper's sum of products of q is near 0 for flat distributions at any depth, so the products here are of the
    probabilities to be the target's own sample. ValueError for `alive` outside (0, 1) and `check` below 1.
    """

    alive: float = 0.2
    check: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alive < 1 or self.check < 1:
            raise ValueError(f"alive {self.alive}, check {self.check}: wanted a share between 0 and 1, a depth from 1")

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below a beam with little probability."""
        is_over = layer.reach.logsumexp(1) < math.log(self.alive)
        return (is_over & (layer.depth >= self.check))[:, None, None]

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the size of all nodes that are not stopped; one deeper only where the last beam is not stopped."""
        nodes, depth = super().preferred_size(pool)
        last = torch.where((pool.depths == pool.deepest) & not_stopped(pool.values), pool.values, -torch.inf)
        is_over = last.logsumexp(1) < math.log(self.alive)
        return nodes, torch.where(is_over, depth.clamp(max=pool.deepest), depth)
