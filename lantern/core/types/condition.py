"""The condition of the pictures: captions, class labels or token prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of pictures: caption features, class labels, or the tokens of each guidance row.

    Features come left-padded with their mask (b t). Tokens come left-padded with their mask (b 2 t), the conditional
    row first; the rows of an image may differ in length. ValueError unless exactly one kind is given, for a batch of
    no images, and for a mask whose shape is not that of the features or tokens.
    """

    embeddings: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | Bool[Tensor, "b r t"] | None = None
    labels: Int[Tensor, " b"] | None = None
    tokens: Int[Tensor, "b r t"] | None = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.embeddings, self.labels, self.tokens)) != 1:
            raise ValueError("a condition is caption embeddings with their mask, or class labels: give one of them")
        for name, given, size in (("caption", self.embeddings, 2), ("token", self.tokens, 3)):
            if given is not None and (self.mask is None or self.mask.shape != given.shape[:size]):
                got = None if self.mask is None else list(self.mask.shape)
                raise ValueError(f"the {name} mask is {got}, wanted {list(given.shape[:size])} like the {name}s")
        if self.batch < 1:
            raise ValueError("the condition is of 0 images, wanted at least 1")

    @property
    def batch(self) -> int:
        """Number of images."""
        return len(self._parts()[0])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._parts()[0].device

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        return self._map(lambda part: part.to(device))

    def select(self, images: Sequence[int]) -> "Condition":
        """Return the condition of some of the images, in this order."""
        return self._map(lambda part: part[list(images)])

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.embeddings, self.labels, self.tokens, self.mask) if part is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Condition":
        fields = ("embeddings", "mask", "labels", "tokens")
        given = {name: getattr(self, name) for name in fields}
        return Condition(**{name: change(part) for name, part in given.items() if part is not None})
