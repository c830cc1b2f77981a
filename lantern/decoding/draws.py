"""The best codes of laws by Gumbel noise, in one call where a target's runner has one for it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lantern.sampling import Sampling


def quick_draws(target: Any, sampling: Sampling, noise: Any) -> Callable[..., Tensor] | None:
    """What gives the best codes by log p + g straight from logits; None where the target's runner has no such thing.

    To be called with logits `(b r n v)`, the numbers of the codes `(b n)`, `width` and `purpose` (of the noise); gives
    `(b n width)`, the best first. One row of logits is taken for guided already. The best are bit for bit those of
    `(sampling.scores(logits, places) + noise.gumbel(places)).argmax(-1)`.
    """
    offered = getattr(target, "draws", None)
    return None if offered is None else offered(sampling, noise)
