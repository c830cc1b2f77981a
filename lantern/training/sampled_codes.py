"""Codes that a model samples for prompts: the data of table-based drafters."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.types import Step
from lantern.decoding.plain import generate
from lantern.eval.speed.contenders import condition_of
from lantern.models.folder import Model

BATCH = 16
Watch = Callable[[Sequence[int], Step], None]


def sampled_codes(
    model: Model, prompts: Sequence[str], *, seed: int, watch: Watch | None = None, batch: int = BATCH
) -> Int[Tensor, "n codes"]:
    """Sample one image per prompt by plain decoding; `watch` is called with the images and result of every step."""
    from tqdm import tqdm

    found = []
    for first in tqdm(range(0, len(prompts), batch), desc=f"pictures of seed {seed}", disable=None):
        numbers = list(range(first, min(first + batch, len(prompts))))
        reported = None if watch is None else (lambda step, numbers=numbers: watch(numbers, step))
        made = generate(
            model.target,
            condition_of(model, prompts, numbers),
            sampling=model.sampling(),
            keys=[(seed, number) for number in numbers],
            callback=reported,
        )
        found.append(made.codes.cpu())
    return torch.cat(found)
