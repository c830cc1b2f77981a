"""The condition of the pictures: captions or class labels."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of pictures: caption features, left-padded, with their mask, or class labels.

    ValueError for both or neither, for a batch of no images, and for a mask whose shape is not that of the features.
    """

    embeddings: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | None = None
    labels: Int[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        if (self.embeddings is None) == (self.labels is None):
            raise ValueError("a condition is caption embeddings with their mask, or class labels: give one of them")
        if self.embeddings is not None and (self.mask is None or self.mask.shape != self.embeddings.shape[:2]):
            got = None if self.mask is None else list(self.mask.shape)
            raise ValueError(f"the caption mask is {got}, wanted {list(self.embeddings.shape[:2])} like the embeddings")
        if self.batch < 1:
            raise ValueError("the condition is of 0 images, wanted at least 1")

    @property
    def batch(self) -> int:
        """Number of images."""
        given = self.labels if self.embeddings is None else self.embeddings
        assert given is not None
        return given.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        given = self.labels if self.embeddings is None else self.embeddings
        assert given is not None
        return given.device

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        if self.embeddings is None or self.mask is None:
            return Condition(labels=self.labels if self.labels is None else self.labels.to(device))
        return Condition(embeddings=self.embeddings.to(device), mask=self.mask.to(device))
