"""Which cache slots each node of a tree sees: the prompt, the committed codes, its own ancestors."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache


class TreeMask:
    """What is added to attention scores `(images x rows, nodes, slots)` in a pass over staged nodes: 0 or -inf.

    For prompt "p" (where `prefix` stands: what is added there, or which slots are seen), two committed codes of four,
    and the tree a(b c(d)), with 0 shown as 1 and -inf as a dot:

              p | 0 1 2 3 | a b c d
        a     1 | 1 1 . . | 1 . . .
        b     1 | 1 1 . . | 1 1 . .
        c     1 | 1 1 . . | 1 . 1 .
        d     1 | 1 1 . . | 1 . 1 1
    """

    def __init__(self, cache: StaticCache, prefix: Bool[Tensor, "b t"] | Float[Tensor, "b t"], nodes: int) -> None:
        self._cache, dtype, device = cache, cache.buffer.dtype, prefix.device
        size = (cache.images, cache.rows, nodes, cache.slots)
        self._buffer = torch.full(size, -torch.inf, dtype=dtype, device=device)
        self._shown, self._hidden = torch.tensor([0.0, -torch.inf], dtype=dtype, device=device).unbind()
        scores = self._scores(prefix) if prefix.dtype == torch.bool else prefix.to(dtype)
        self._buffer[..., : cache.prefix] = scores[:, None, None]
        self._codes = torch.arange(cache.codes, device=device)
        self._last: Tensor | None = None

    def update(self, lengths: Int[Tensor, " b"], ancestors: Bool[Tensor, "*b n m"]) -> Float[Tensor, "rows n s"]:
        """Masks for n nodes that see `lengths` committed codes and `ancestors` among the first m stage slots."""
        nodes, width = ancestors.shape[-2:]
        view = self._buffer[:, :, :nodes]
        first = self._cache.first_stage_slot
        view[..., self._cache.prefix : first] = self._scores(self._codes < lengths[:, None])[:, None, None]
        if ancestors is not self._last:  # a static tree is written once
            seen = self._scores(ancestors)
            view[..., first : first + width] = seen if seen.ndim == 2 else seen[:, None]
            view[..., first + width :] = -torch.inf
            self._last = ancestors
        return view.flatten(0, 1)

    def _scores(self, seen: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return torch.where(seen, self._shown, self._hidden)
