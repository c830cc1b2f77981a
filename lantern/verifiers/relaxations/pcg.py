"""Principled coarse-graining: a draft is tested by the probability of a group of codes; groups follow p exactly."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from lantern.core.sampling import logs
from lantern.core.types import RelaxationDefaults, Relaxed
from lantern.methods.spec import MethodSpec, Setting


@dataclass(frozen=True)
class Members:
    """Pairs of a group and a code in it: numbers and L2 distance; and 1 / the number of groups of each code."""

    groups: Int[Tensor, " m"]
    codes: Int[Tensor, " m"]
    distances: Float[Tensor, " m"]
    shares: Float[Tensor, " v"]


@dataclass(frozen=True, eq=False)
class Pcg(RelaxationDefaults):
    """Replace p by the distribution that group-level rejection sampling emits for a single draft.

    Yanuka et al., "Principled Coarse-Grained Acceptance for Speculative Decoding in Speech", arXiv:2511.13732. Each
    code t is the seed of a group G(t): itself, and those of its k nearest codes whose cosine similarity to it is above
    `threshold`. A code gives an equal share of its probability to each of its groups, so that P(G) and Q(G), the sums
    of shares of p and q, are distributions of groups. The draft x, assigned to one of its groups at random, is accepted
    with probability min(1, P(G) / Q(G)); a rejection samples a group from norm(max(P - Q, 0)) and a code in it from p.
    Groups then follow P exactly. Codes follow

        r(y) = p(y) + sum over groups G of y of [min(1, P/Q) q(y) - min(1, Q/P) p(y)] / number of groups of y

    which is verified here as any relaxation. k = 0 or a threshold of 1 is exact. The latent distance is an upper bound:
    mass that moves within a group is taken to pass through its seed. ValueError for a value out of range.
    """

    table: Int32[Tensor, "v columns"]
    codebook: Float[Tensor, "v d"]
    k: int = 8
    threshold: float | int = 0.9
    members: Members = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or not 0 <= self.k <= self.table.shape[1]:
            columns = self.table.shape[1]
            raise ValueError(f"k is {self.k}, wanted from 0 to {columns}: the proximity table has {columns} columns")
        if isinstance(self.threshold, bool) or not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}, wanted a cosine from -1 to 1")
        object.__setattr__(self, "members", self._members())

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r, its total variation, and a bound of the moved mass times distance."""
        members, p = self.members, log_p.exp()
        own_p, own_q = ((probs * members.shares)[:, members.codes] for probs in (p, log_q.exp()))
        groups, codes = (index.expand_as(own_p) for index in (members.groups, members.codes))
        groups_p, groups_q = (torch.zeros_like(p).scatter_add(1, groups, own) for own in (own_p, own_q))
        least = torch.finfo(p.dtype).tiny
        from_q = (groups_p / groups_q.clamp(min=least)).clamp(max=1.0).gather(1, groups) * own_q
        from_p = (groups_q / groups_p.clamp(min=least)).clamp(max=1.0).gather(1, groups) * own_p
        moved = from_q - from_p
        change = torch.zeros_like(p).scatter_add(1, codes, moved)
        r = (p + change).clamp_(min=0.0)
        # log(exp(x)) is not x to the last bit: codes that did not change keep log p.
        log_r = torch.where(r == p, log_p, logs(r))
        return Relaxed(log_r, change.abs().sum(-1) / 2, (moved.abs() * members.distances).sum(-1))

    def _members(self) -> Members:
        """Return the pairs of seeds with themselves, then with their neighbours above the threshold."""
        seeds = torch.arange(len(self.table), device=self.table.device)
        wide = torch.nn.functional.normalize(self.codebook.double(), dim=-1)
        near = self.table[:, : self.k].long()
        cosines = torch.stack([(wide * wide[column]).sum(-1) for column in near.unbind(1)], 1) if self.k else near
        is_in = cosines > self.threshold
        groups = torch.cat([seeds, seeds[:, None].expand_as(near)[is_in]])
        codes = torch.cat([seeds, near[is_in]])
        distances = (self.codebook[groups].double() - self.codebook[codes].double()).norm(dim=-1).float()
        return Members(groups, codes, distances, 1.0 / codes.bincount(minlength=len(seeds)).float())


METHODS = (
    MethodSpec(
        "pcg",
        "relaxed: PCG (reconstructed): a draft is tested by the probability of its groups of similar codes",
        "eagle",
        drafter="lantern.drafters.eagle.drafter:build",
        tree="grown_8_2",
        relaxation=Pcg,
        settings=(
            Setting("k", 8, "nearest codes that a group may hold; 0 is exact", low=0, high=1024, sweep=(4, 8, 16)),
            Setting("threshold", 0.9, "cosine to its seed above which a code is in a group", low=-1, high=1),
        ),
        add_ons=("eagle1",),
        paper="2511.13732",
    ),
)
