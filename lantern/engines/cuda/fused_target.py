"""LlamaGen targets whose small passes run by the products of `fused`: six launches a layer instead of ten."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Scores
from lantern.core.weights import WeightCache
from lantern.decoding.cache import StaticCache
from lantern.engines.cuda import fused, kernels
from lantern.engines.cuda.rows import ROWS, constant_rows, rows_of
from lantern.engines.cuda.target import KernelPass, KernelTarget

FEW = 128  # rows of a batch up to which one read of the weights per 64 rows is fewer bytes than its activations


class FusedPass(KernelPass):
    """As `KernelPass`, for LlamaGen's layers; larger batches run as there.

    Which of the two runs depends on the batch and not on the number of nodes, so that bits do not either.
    """

    def __call__(
        self,
        inputs: Float[Tensor, "lines n c"],
        positions: Int[Tensor, "lines n"],
        mask: Float[Tensor, "lines n s"],
        *,
        cache: StaticCache,
        slots: Int[Tensor, "lines n"],
        taps: tuple[int, ...] = (),
        least: int = ROWS,
        block: int = kernels.BLOCK,
    ) -> Scores:
        """Score inputs, as `KernelPass`."""
        config, (lines, live) = self.config, inputs.shape[:2]
        if lines * constant_rows(lines, least) > FEW:
            return super().__call__(
                inputs, positions, mask, cache=cache, slots=slots, taps=taps, least=least, block=block
            )
        space = self._space(cache, rows_of(lines, live, least), block)
        space.plan.update(positions, mask, slots[0], conditioning=config.cls_token_num, prefix=cache.prefix)
        squares, own = space.squares, dict[int, Tensor]()
        how: dict[str, Any] = {"rows": space.rows}
        fused.enter(inputs, space.x, squares, **how)
        for number, layer in enumerate(self.layers):
            if number in taps:
                own[number] = self._live(space.x, space, live).clone()
            kept, eps = cache.layer(number), self.eps
            (wqkv, qkv_scale), (out, out_scale) = layer.qkv.parts[0], layer.out.parts[0]
            (w13, gate_scale), (down, down_scale) = layer.gate_up.parts[0], layer.down.parts[0]
            fused.qkv(
                *(space.x, wqkv, layer.attention_norm, squares, space.qkv, self.rope, positions, slots[0], kept),
                scale=qkv_scale,
                eps=eps,
                **how,
            )
            space.attention(space.qkv, kept, mask, space.attended, prefix=cache.prefix)
            fused.single(space.attended, out, space.x, squares, scale=out_scale, live=live, **how)
            fused.gate_up(
                space.x, w13, layer.ffn_norm, squares, space.hidden, scale=gate_scale, eps=eps, live=live, **how
            )
            fused.single(space.hidden, down, space.x, squares, scale=down_scale, live=live, **how)
        features = torch.empty_like(space.x)
        kernels.norm(space.x, None, self.norm, features, eps=self.eps, rows=space.rows, live=live)
        logits = features.new_empty(lines * live, config.vocab_size, dtype=torch.float32)
        head, scale = self.head.parts[0]
        fused.single(features, head, logits, None, scale=scale, live=live, **how)
        tapped = torch.cat([own[layer] for layer in taps], -1) if taps else None
        return Scores(logits.unflatten(0, (lines, live)), self._live(features, space, live), tapped)


def is_fused(target: Any, rows: int) -> bool:
    """Return whether passes of so many rows of a prepared target run by the products of `fused`."""
    return isinstance(target.program, FusedPass) and rows <= FEW


class FusedTarget(KernelTarget):
    """A target with the passes of `FusedPass`."""

    passes: ClassVar[WeightCache[Any]] = WeightCache(FusedPass)
