"""Verification skipping (VVS): the first tokens of a step are committed as the drafter sampled them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import check_number
from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed

MAX_SKIP = 32  # tokens


@dataclass(frozen=True, eq=False)
class Vvs(Relaxation):
    """The drafter's distribution q above depth `skip`, the target's p below: r = q where depth < skip, else p.

    Dong et al., "VVS", arXiv:2511.13587. A step without verification commits L tokens of a draft path, and the next
    step drafts behind them and verifies. Both are one pass here: its tree begins with a chain of L tokens that are not
    tested, and the tree behind them is. With `skip` 0 it is exact.

    The mass that q has in excess comes from that which p has in excess, independently of it. The root mean square
    distance of both, an upper bound of the mean distance, is reported as latent distance; None without `codebook`.
    ValueError for a value out of range.
    """

    skip: int = 1
    codebook: Float[Tensor, "v d"] | None = None

    def __post_init__(self) -> None:
        check_number("skip", self.skip, 0, MAX_SKIP, kind=int)

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r, its total variation (0 where tokens are tested), and an upper bound of the latent distance."""
        is_skipped = depths < self.skip
        change = (log_q.exp() - log_p.exp()).masked_fill(~is_skipped[:, None], 0.0)
        moved = change.abs().sum(-1) / 2
        log_r = torch.where(is_skipped[:, None], log_q, log_p)
        distance = neighbours.root_mean_square(self.codebook, change.clamp(min=0.0), (-change).clamp(min=0.0))
        return Relaxed(log_r, moved, None if distance is None else moved * distance)
