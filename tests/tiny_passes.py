"""Passes over a tree behind committed tokens, with random keys and values."""

from typing import Any

import torch

from lantern.core.types import Target
from lantern.decoding.cache import StaticCache
from tests.proof.test_trees import shape_of


class Passes:
    """A cache in which `known` tokens are committed, and passes over nodes that follow them.

    Images are alike. There is a row of each for each of the `lengths` of its prompts, behind `padding`; LlamaGen's
    prompts are one slot, or with `padding` two alike.
    Inputs of the last row are `last` times those of the first.
    """

    def __init__(
        self,
        target: Target,
        known: int,
        images: int = 1,
        lengths: tuple[int, ...] = (1, 1),
        *,
        stage: int = 24,
        last: float = 1.0,
        padding: int = 0,
        device: str = "cpu",
        is_fp8: bool = False,
    ) -> None:
        config, prefix, rows = target.config, padding + max(lengths), len(lengths)
        self.target, self.known, self.images, self.rows, self.last = target, known, images, rows, last
        sizes: dict[str, Any] = {"layers": config.n_layer, "heads": config.n_head, "head_dim": config.head_dim}
        sizes |= {"images": images, "rows": rows, "prefix": prefix, "tokens": config.block_size, "stage": stage}
        self.cache = cache = StaticCache(**sizes, dtype=torch.float32, device=device, is_fp8=is_fp8)
        held = torch.randn(
            *(2 * config.n_layer, rows, config.n_head, max(lengths) + known, config.head_dim),
            generator=torch.Generator().manual_seed(3),
        )
        shown = torch.arange(prefix) >= prefix - torch.tensor(lengths)[:, None]
        self.shown = shown.expand(images, -1, -1)
        if max(lengths) == 1:
            held[0::2, :, :, 0] = 0
            self.shown = torch.linspace(1.5, -0.5, prefix).expand(images, -1)
        else:
            cache.first.copy_(torch.tensor(lengths).repeat(images)[:, None])
        cache.buffer.copy_(cache.stored(torch.full(cache.buffer.shape, 0.7)))  # where nothing is seen
        cache.buffer[:, :, :, padding : prefix + known] = cache.stored(held).to(device).repeat(1, images, 1, 1, 1)
        if max(lengths) == 1:
            cache.buffer[:, :, :, :padding] = cache.buffer[:, :, :, padding:prefix]

    @torch.no_grad()
    def score(self, tokens: list[int], parents: tuple[int, ...], known: int | None = None) -> Any:
        """Score nodes behind `known` tokens; keys and values go to the stage."""
        config, cache, shape = self.target.config, self.cache, shape_of([parents])
        device, rows, known = cache.buffer.device, self.rows * self.images, self.known if known is None else known
        lengths = torch.full((self.images,), known, device=device)
        mask = cache.tree_mask(self.shown.to(device), len(tokens)).update(lengths, shape.ancestors.to(device))
        size = torch.linspace(1.0, self.last, self.rows, device=device).repeat(self.images)
        embedded = self.target.tok_embeddings(torch.tensor([tokens], device=device))
        inputs = embedded * size[:, None, None].to(embedded.dtype)
        positions = (shape.depths + known + config.cls_token_num).expand(rows, -1).to(device)
        slots = (torch.arange(len(tokens), device=device) + cache.first_stage_slot).expand(rows, -1)
        return self.target(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1))
