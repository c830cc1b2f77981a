"""Pairs of committed tokens and the guided features F* that predicted them, the input of the heads."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step


@dataclass(frozen=True)
class Pairs:
    """m pairs (feature that predicted a token, token) of each image, in raster order; the first `counts` are valid.

    `features` are guidance-combined, F* = f_u + s (f_c - f_u); `start` is the number of the first token, `places` the
    numbers of all tokens, clamped to the image.
    """

    features: Float[Tensor, "b m c"]
    tokens: Int[Tensor, "b m"]
    places: Int[Tensor, "b m"]
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]

    @classmethod
    def of_step(cls, step: Step, sampling: Sampling, count: int) -> "Pairs":
        """Return the tokens that a step committed, for images of `count` tokens."""
        ahead = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        places = (step.start[:, None] + ahead).clamp(max=count - 1)
        features = sampling.guide(step.of_tokens(step.scores.features), places)
        return cls(features, step.tokens, places, step.start, step.counts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields in order."""
        return self.features, self.tokens, self.places, self.start, self.counts

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of committed tokens of each image, these included."""
        return self.start + self.counts

    @property
    def last(self) -> Int[Tensor, "b 1"]:
        """Index of the last committed pair; for finished images, which have none, it is arbitrary."""
        return (self.counts - 1).clamp(min=0)[:, None]

    @property
    def root(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.tokens.gather(1, self.last)

    def last_features(self) -> Float[Tensor, "b 1 c"]:
        """Return the feature that predicted the last committed token."""
        return self.features.gather(1, self.last[..., None].expand(-1, -1, self.features.shape[-1]))
