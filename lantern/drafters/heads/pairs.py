"""Pairs of committed codes and the guided features F* that predicted them, the input of the heads."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Kept, Prefill, Step


@dataclass(frozen=True)
class Pairs:
    """m pairs (feature that predicted a code, code) of each image, in raster order; the first `counts` are valid.

    `features` are guidance-combined, F* = f_u + s (f_c - f_u); `start` is the number of the first code, `places` the
    numbers of all codes, clamped to the image.
    """

    features: Float[Tensor, "b m c"]
    codes: Int[Tensor, "b m"]
    places: Int[Tensor, "b m"]
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]

    @classmethod
    def of_prompt(cls, prefill: Prefill, sampling: Sampling) -> "Pairs":
        """Return code 0 with the feature of the prompt's last slot."""
        places = torch.zeros_like(prefill.first)[:, None]
        features = sampling.guide(prefill.features[:, :, -1:], places)
        return cls(features, prefill.first[:, None], places, places[:, 0], torch.ones_like(prefill.first))

    @classmethod
    def of_step(cls, step: Step, sampling: Sampling, count: int) -> "Pairs":
        """Return the codes that a step committed, for images of `count` codes."""
        assert step.scores is not None and step.verdict is not None
        rows = step.scores.features.unflatten(0, (len(step.counts), -1))
        visited = torch.nn.functional.pad(step.verdict.path, (1, 0))
        index = visited[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1])
        ahead = torch.arange(visited.shape[1], device=visited.device)
        places = (step.start[:, None] + ahead).clamp(max=count - 1)
        return cls(sampling.guide(rows.gather(2, index), places), step.codes, places, step.start, step.counts)

    @classmethod
    def of_kept(cls, kept: Kept, sampling: Sampling, start: int) -> "Pairs":
        """Return given codes, of which the first is number `start`."""
        images, count = kept.codes.shape
        places = torch.arange(start, start + count, device=kept.codes.device).expand(images, -1)
        counts = torch.full_like(places[:, 0], count)
        return cls(sampling.guide(kept.features, places), kept.codes, places, places[:, 0], counts)

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of committed codes of each image, these included."""
        return self.start + self.counts

    @property
    def last(self) -> Int[Tensor, "b 1"]:
        """Index of the last committed pair; for finished images, which have none, it is arbitrary."""
        return (self.counts - 1).clamp(min=0)[:, None]

    @property
    def root(self) -> Int[Tensor, "b 1"]:
        """The last committed code."""
        return self.codes.gather(1, self.last)

    def last_features(self) -> Float[Tensor, "b 1 c"]:
        """Return the feature that predicted the last committed code."""
        return self.features.gather(1, self.last[..., None].expand(-1, -1, self.features.shape[-1]))
