"""The condition of images, and what a target read of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of images: caption features, class labels, or the tokens of each guidance row.

    Features come left-padded with their mask (b t). Tokens come left-padded with their mask (b 2 t), the conditional
    row first; the rows of an image may differ in length. `negative` holds caption features that take the place of the
    unconditional caption in the other guidance row. ValueError unless exactly one kind is given, for a batch of no
    images, for a mask whose shape is not that of the features or tokens, and for a negative of another kind or batch.
    """

    embeddings: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | Bool[Tensor, "b r t"] | None = None
    labels: Int[Tensor, " b"] | None = None
    tokens: Int[Tensor, "b r t"] | None = None
    negative: "Condition | None" = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.embeddings, self.labels, self.tokens)) != 1:
            raise ValueError("a condition is caption embeddings with their mask, or class labels: give one of them")
        for name, given, size in (("caption", self.embeddings, 2), ("token", self.tokens, 3)):
            if given is not None and (self.mask is None or self.mask.shape != given.shape[:size]):
                got = None if self.mask is None else list(self.mask.shape)
                raise ValueError(f"the {name} mask is {got}, wanted {list(given.shape[:size])} like the {name}s")
        if self.batch < 1:
            raise ValueError("the condition is of 0 images, wanted at least 1")
        if self.negative is not None and (
            self.embeddings is None or self.negative.embeddings is None or self.negative.batch != self.batch
        ):
            raise ValueError("a negative condition is caption embeddings, one for each image of caption embeddings")

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

    @classmethod
    def joined(cls, parts: "Sequence[Condition]") -> "Condition":
        """Return the condition of several batches of caption features with as many slots; all or none have a negative.

        ValueError for other kinds of conditions.
        """
        if any(part.embeddings is None or (part.negative is None) != (parts[0].negative is None) for part in parts):
            raise ValueError("only caption embeddings are joined, with negative ones for all or none")
        return cls(
            embeddings=torch.cat([part.embeddings for part in parts if part.embeddings is not None]),
            mask=torch.cat([part.mask for part in parts if part.mask is not None]),
            negative=cls.joined([part.negative for part in parts if part.negative is not None])
            if parts[0].negative is not None
            else None,
        )

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.embeddings, self.labels, self.tokens, self.mask) if part is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Condition":
        fields = ("embeddings", "mask", "labels", "tokens")
        given = {name: getattr(self, name) for name in fields}
        changed = {name: change(part) for name, part in given.items() if part is not None}
        return Condition(**changed, negative=None if self.negative is None else self.negative._map(change))


@dataclass(frozen=True)
class Prompt:
    """All that tokens and drafters see of the prompts of b images, as `Target.read` returns it.

    `entries` are the keys and values of each layer, in the cache's dtype; `scores` are added to the attention scores of
    their p slots: 0, log n where a slot stands for n words, -inf for padding. `first` is the position of token 0 beyond
    `config.cls_token_num`, `logits` are its logits. `features` are those of the last slot, or of all slots with their
    `mask`, and `fused` the inputs of tapped layers there, side by side; None where the drafter taps none. `condition`
    is what was read, for drafters that are models of their own; None for parts of a batch.
    """

    entries: Float[Tensor, "b l 2 r h p d"]
    scores: Float[Tensor, "b r p"]
    first: Int[Tensor, "b r"]
    logits: Float[Tensor, "b r 1 v"]
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    fused: Float[Tensor, "b r t k"] | None = None
    condition: Condition | None = None

    def at(self, image: int) -> "Prompt":
        """Return the prompt of one image, as a batch of one, without slots that are padding in all of its rows."""
        one = slice(image, image + 1)
        found = Prompt(*(None if part is None else part[one] for part in self._parts()))  # type: ignore[arg-type]
        hidden = int((found.scores == -torch.inf).all(1).long().cumprod(-1).sum())
        return found._with_slots(max(found.scores.shape[-1] - hidden, 1)) if hidden else found

    @classmethod
    def joined(cls, parts: "Sequence[Prompt]") -> "Prompt":
        """Return the prompts of several batches, padded to the longest."""
        longest = max(part.scores.shape[-1] for part in parts)
        lists = zip(*(part._with_slots(longest)._parts() for part in parts), strict=True)
        return cls(*(None if some[0] is None else torch.cat(some) for some in lists))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts() if part is not None)

    def _with_slots(self, count: int) -> "Prompt":
        """Return the prompts with this number of slots, cut or padded on the left."""
        if (missing := count - self.scores.shape[-1]) == 0:
            return self
        entries, scores = pad(self.entries, (0, 0, missing, 0)), pad(self.scores, (missing, 0), value=-torch.inf)
        return Prompt(entries.contiguous(), scores, *self._parts()[2:])

    def _parts(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)[:-1]]
