"""What a target read of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Prompt:
    """All that tokens and drafters see of the prompts of b images, as `Target.read` returns it.

    `entries` are the keys and values of each layer, in the cache's dtype; `scores` are added to the attention scores of
    their p slots: 0, log n where a slot stands for n words, -inf for padding. `first` is the position of token 0 beyond
    `config.cls_token_num`, `logits` are its logits. `features` are those of the last slot, or of all slots with their
    `mask`, and `fused` the inputs of tapped layers there, side by side.
    """

    entries: Float[Tensor, "b l 2 r h p d"]
    scores: Float[Tensor, "b r p"]
    first: Int[Tensor, "b r"]
    logits: Float[Tensor, "b r 1 v"]
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    fused: Float[Tensor, "b r t k"] | None = None

    def at(self, image: int) -> "Prompt":
        """Return the prompt of one image, as a batch of one, without slots that are padding in all of its rows."""
        found = self._map(lambda part: part[image : image + 1])
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
        return [getattr(self, field.name) for field in fields(self)]

    def _map(self, change: Any) -> "Prompt":
        return Prompt(*(None if part is None else change(part) for part in self._parts()))  # type: ignore[arg-type]
