"""Which cache slots each node of a tree sees: the prompt, the committed codes, its own ancestors."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache


class TreeMask:
    """The mask `(images x rows, nodes, slots)` of a pass over staged nodes, updated in place by index arithmetic.

    For prompt "p", two committed codes of four, and the tree a(b c(d)):

              p | 0 1 2 3 | a b c d
        a     1 | 1 1 . . | 1 . . .
        b     1 | 1 1 . . | 1 1 . .
        c     1 | 1 1 . . | 1 . 1 .
        d     1 | 1 1 . . | 1 . 1 1
    """

    def __init__(self, cache: StaticCache, prefix: Bool[Tensor, "b t"], nodes: int) -> None:
        self._cache, self._nodes = cache, nodes
        device = prefix.device
        self._buffer = torch.zeros(cache.images, cache.rows, nodes, cache.slots, dtype=torch.bool, device=device)
        self._buffer[..., : cache.prefix] = prefix[:, None, None]
        self._codes = torch.arange(cache.codes, device=device)

    def update(self, lengths: Int[Tensor, " b"], ancestors: Bool[Tensor, "*b n m"]) -> Bool[Tensor, "rows n s"]:
        """Masks for n nodes that see `lengths` committed codes and `ancestors` among the first m stage slots."""
        nodes, width = ancestors.shape[-2:]
        view = self._buffer[:, :, :nodes]
        first = self._cache.first_stage_slot
        seen = self._codes < lengths[:, None]
        view[..., self._cache.prefix : first] = seen[:, None, None]
        view[..., first : first + width] = ancestors if ancestors.ndim == 2 else ancestors[:, None]
        view[..., first + width :] = False
        return view.flatten(0, 1)
