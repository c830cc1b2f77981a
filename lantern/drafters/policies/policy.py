"""The interface between the drafter of dynamic trees and its policies, in tensors of static shape.

A policy estimates for every candidate the probability that the target takes it, given that its parent was reached. The
value of a node is the product of these along its path (its reach), and the nodes of highest value are drafted. All
policies thus estimate the same quantity. Where a policy stops it returns -inf: such nodes come last, and the host may
make the next tree smaller.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import Buffers, Step

MAX_DEPTH = 12
# Log probabilities: of the least likely node that is not stopped, of a stopped node, and of the most likely one.
# MAX_DEPTH times the first is above the second, and the last keeps a child below its parent in fp32 at any depth.
MIN_LOG, STOPPED, MAX_LOG = -15.0, -200.0, -1e-3
STOPPED_BELOW = -190.0

TRAITS = ("joint", "match", "log_q", "entropy", "gap", "depth", "rank", "left", "up", "up_right", "row", "column")


@dataclass(frozen=True)
class Layer:
    """Nodes of one depth, f per image, whose children are chosen out of k candidates each, in sampling order.

    `places` is the number of the token that the children predict, `side` the tokens per row. `reach` is the log
    probability of reaching a node by the policy, `joint` by the scores alone. `entropy` (nats) and `collision` (sum of
    q squared) describe the distribution of the children. `near` is the acceptance at the left, upper and upper right
    neighbours, from 0 to 1. `log_q` and `match` of a candidate are its log q and the log probability that it is the
    target's own sample, by its score log q plus noise; both are None where a policy must not read sampled tokens.
    """

    depth: int
    side: int
    places: Int[Tensor, " b"]
    reach: Float[Tensor, "b f"]
    joint: Float[Tensor, "b f"]
    entropy: Float[Tensor, "b f"]
    collision: Float[Tensor, "b f"]
    near: Float[Tensor, "b 3"]
    width: int
    log_q: Float[Tensor, "b f k"] | None = None
    match: Float[Tensor, "b f k"] | None = None


@dataclass(frozen=True)
class Pool:
    """All candidates of a step: the log probability of reaching each and its depth, from 1 to `deepest`."""

    values: Float[Tensor, "b p"]
    depths: Int[Tensor, " p"]
    deepest: int


class Policy:
    """Estimates acceptance probabilities, for one generation at a time.

    `is_predictable`: it reads no sampled candidate, so trees may be sampled and verified by rejection. `saves`: its
    preferred sizes vary from step to step. `reads_neighbours`: it reads `Layer.near`. What it keeps between steps is in
    `held`, in tensors of constant size; what it keeps between the depths of a tree begins anew at depth 0.
    """

    is_predictable: ClassVar[bool] = False
    saves: ClassVar[bool] = True
    reads_neighbours: ClassVar[bool] = False

    @cached_property
    def held(self) -> Buffers:
        """What it keeps between steps."""
        return Buffers()

    def begin(self, images: int, device: torch.device) -> None:
        """Begin a generation of so many images."""

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities of the candidates given their parents; -inf where it stops."""
        raise NotImplementedError

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the number of drafted nodes and the depth of the tree that fits a step's candidates.

        It is that of all nodes that are not stopped, and at most one deeper than the step's.
        """
        return size_of(pool, not_stopped(pool.values))

    def observe(self, step: Step) -> None:
        """Read what was accepted of a step's tree."""


class StoppingPolicy(Policy):
    """Estimates that the target takes a candidate as often as it is its own sample by the scores, and stops early."""

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities to match, -inf where it stops."""
        assert layer.match is not None
        return layer.match.masked_fill(self.stops(layer), -torch.inf)

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return which candidates are not drafted."""
        raise NotImplementedError


def check_share(name: str, share: float) -> None:
    """Raise ValueError for a share outside (0, 1)."""
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}, wanted between 0 and 1")


def match_chances(scores: Float[Tensor, "*n v"], spread: float) -> Float[Tensor, "*n v"]:
    """Return the log probability that each token is the target's own sample, given the drafter's scores log q + g.

    The target samples the arg-max of log p + g = scores + (log p - log q). If log p - log q is distributed like
    `spread` times Gumbel noise, this is the softmax of scores / spread; without noise and with spread 1 it is q.
    """
    return (scores / spread).log_softmax(-1)


def not_stopped(values: Float[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Return which candidates the policy has not stopped."""
    return values > STOPPED_BELOW


def size_of(pool: Pool, is_kept: Bool[Tensor, "b p"]) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Return the number and the depth of the kept nodes; one deeper if that is the last depth."""
    depth = torch.where(is_kept, pool.depths, 0).amax(1)
    return is_kept.sum(1), depth + (depth == pool.deepest)


def traits_of(layer: Layer) -> Float[Tensor, "b f k t"]:
    """Return the TRAITS of each candidate: logs in nats, depth and rank as counts, the rest from 0 to 1."""
    assert layer.log_q is not None and layer.match is not None
    size = layer.match.shape
    match, log_q = (values.clamp(min=MIN_LOG) for values in (layer.match, layer.log_q))
    rank = torch.arange(size[2], device=match.device)
    cell = torch.stack([layer.places // layer.side, layer.places % layer.side], 1) / layer.side
    of_image = torch.cat([layer.near, cell], 1)[:, None, None].expand(*size[:2], size[2], 5)
    of_node = [
        layer.joint[..., None] + match,
        match,
        log_q,
        layer.entropy[..., None].expand(size),
        match - match[..., :1],
        torch.full_like(match, float(layer.depth + 1)),
        rank.expand(size).to(match.dtype),
    ]
    return torch.cat([torch.stack(of_node, -1), of_image], -1)


def padded_beam(beam: Float[Tensor, "b f"], width: int) -> Float[Tensor, "b w"]:
    """Return the best `width` log probabilities of a beam, padded with MIN_LOG."""
    best = beam.topk(min(width, beam.shape[1]), dim=1).values
    return torch.nn.functional.pad(best, (0, width - best.shape[1]), value=MIN_LOG)
