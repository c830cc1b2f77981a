"""Plain decoding with the keys and values of a few rows of codes only: the first rows and the latest (after LineAR).

The memory of a cache and the bytes that a pass reads of it grow with the batch; with large batches they exceed the
weights. A code whose keys and values are dropped is hidden from all later ones, so the distribution is not that of
plain decoding. The total variation between both is measured at the end, in passes with a whole cache.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation, Scores, Step, Target
from lantern.decoding.cache import Start
from lantern.decoding.loop import Decoding, Stopwatch
from lantern.decoding.plain import PlainStepper, run_steps
from lantern.decoding.variation import total_variation


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    first_rows: int,
    last_rows: int,
    measured: bool = True,
    **options: Any,
) -> Generation:
    """Sample codes one by one with the noise of plain decoding; each sees `first_rows` and `last_rows` rows of codes.

    The latest `last_rows` rows are as many codes, wherever in a row the last one is. If both together are at least the
    rows of the grid, codes are those of plain decoding. `measured` measures the total variation, for which the cache of
    plain decoding is needed; without it, it is NaN. `options` are the fields of `Decoding`.

    ValueError for fewer than 0 first or 1 last rows, and for a target with newline tokens.
    """
    if first_rows < 0 or last_rows < 1:
        raise ValueError(f"first_rows {first_rows}, last_rows {last_rows}: wanted at least 0 and 1")
    raster = target.config.raster
    if raster.newlines:
        raise ValueError("this model ends its rows with newline tokens, which a cache of few rows lacks: use plain")
    how = Decoding(**options)
    watch, sampling = how.stopwatch(target), how.sampling
    codes = min((first_rows + last_rows) * raster.columns, target.config.block_size)
    begun = how.start(target, condition, stage=0, codes=codes)
    run = RowCacheStepper(target, begun, sampling, watch, anchors=first_rows * raster.columns, is_measured=measured)
    made = run_steps(run, how)
    if run.log_p is None:
        nan = torch.full_like(made.total_variation, torch.nan)
        return replace(made, total_variation=nan, total_variation_max=nan)
    whole = replace(begun, cache=begun.cache.with_codes(target.config.block_size))
    spent = total_variation(target, whole, sampling, made.codes, run.log_p)
    watch.lap("variation")
    return replace(made, total_variation=spent.sum(1), total_variation_max=spent.amax(1), seconds=watch.seconds)


class RowCacheStepper(PlainStepper):
    """Steps of plain decoding whose codes behind the first `anchors` take the slot of the oldest one in the ring."""

    def __init__(
        self, target: Target, begun: Start, sampling: Sampling, watch: Stopwatch, *, anchors: int, is_measured: bool
    ) -> None:
        super().__init__(target, begun, sampling, watch)
        device, codes = self.codes.device, begun.cache.codes
        # tensors, so that a captured step serves other numbers of rows
        self.anchors, self.ring = torch.tensor([[anchors], [max(codes - anchors, 1)]], device=device)
        size = (*self.codes.shape, target.config.vocab_size)
        self.log_p = torch.zeros(size, device=device) if is_measured else None

    def slots(self, places: Int[Tensor, "1 1"]) -> Int[Tensor, "1 1"]:
        """Return the slots of these codes: their own for the first, the oldest one in use for the others."""
        return torch.where(places < self.anchors, places, self.anchors + (places - self.anchors) % self.ring)

    def sample(self, scores: Scores) -> Step:
        """Sample the code at `place`, and keep its distribution."""
        if self.log_p is not None:
            logits = scores.logits.unflatten(0, (-1, self.begun.cache.rows))
            self.log_p.index_copy_(1, self.place[0], self.sampling.log_probs(logits, self.place).to(self.log_p.dtype))
        return super().sample(scores)
