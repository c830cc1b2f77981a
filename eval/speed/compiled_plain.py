"""Plain decoding as gpt-fast does it, as a baseline: static cache, layers by torch.compile, one CUDA graph a step.

https://github.com/pytorch-labs/gpt-fast. One program serves all layers, since weights and caches are its arguments.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lantern.models.llamagen.transformer import Transformer


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, as `RMSNorm`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def turned(x: Float[Tensor, "r h d"], factors: Float[Tensor, "half 2"]) -> Tensor:
    """Rotate neighbouring pairs."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = factors.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def layer(
    x: Float[Tensor, "r c"],
    slot: Tensor,
    factors: Float[Tensor, "half 2"],
    mask: Float[Tensor, "1 s"],
    keys: Float[Tensor, "r h s d"],
    values: Float[Tensor, "r h s d"],
    weights: tuple[Tensor, ...],
    eps: float,
) -> Tensor:
    """One decoder layer for one token per row."""
    first, wqkv, wo, second, w13, w2 = weights
    q, k, v = F.linear(norm(x, first, eps), wqkv).unflatten(-1, (3, keys.shape[1], -1)).unbind(1)
    q, k = turned(q, factors), turned(k, factors)
    keys.index_copy_(2, slot, k[:, :, None])
    values.index_copy_(2, slot, v[:, :, None])
    y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)
    x = x + F.linear(y[:, :, 0].flatten(1), wo)
    gate, up = F.linear(norm(x, second, eps), w13).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w2)


class CompiledPlain:
    """One step after another of plain decoding of one image with guidance; the prompt is one slot of zeros."""

    def __init__(self, target: Transformer, *, guidance: float, top_k: int, compiles: bool = True) -> None:
        config, weight = target.config, target.output.weight
        self.target, self.guidance, self.top_k, self.rows = target, guidance, top_k, 2
        size = (self.rows, config.n_head, config.block_size + 1, config.head_dim)
        made = [torch.zeros(2, *size, dtype=weight.dtype, device=weight.device) for _ in target.layers]
        self.caches = [both.unbind() for both in made]
        self.place = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.token = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.slots = torch.arange(size[2], device=weight.device)
        self.weights: list[Any] = [
            (
                block.attention_norm.weight,
                block.attention.wqkv.weight,
                block.attention.wo.weight,
                block.ffn_norm.weight,
                block.feed_forward.w13.weight,
                block.feed_forward.w2.weight,
            )
            for block in target.layers
        ]
        self.layer, self.ends = layer, self._sample
        if compiles:
            self.layer = torch.compile(layer, dynamic=False, fullgraph=True)
            self.ends = torch.compile(self._sample, dynamic=False, fullgraph=True)

    def __call__(self) -> None:
        """Decode the token at `place`, and count."""
        config, eps = self.target.config, self.target.config.norm_eps
        x = self.target.tok_embeddings(self.token).expand(self.rows, -1)
        factors = self.target.rotary.table.index_select(0, self.place + config.cls_token_num)[0]
        mask = torch.where(self.slots <= self.place + 1, 0.0, -torch.inf)[None].to(x.dtype)
        for (keys, values), weights in zip(self.caches, self.weights, strict=True):
            x = self.layer(x, self.place + 1, factors, mask, keys, values, weights, eps)
        self.token.copy_(self.ends(x))
        self.place.add_(1).clamp_(max=config.block_size - 1)

    def _sample(self, x: Float[Tensor, "r c"]) -> Tensor:
        logits = F.linear(norm(x, self.target.norm.weight, self.target.config.norm_eps), self.target.output.weight)
        wide = logits.float()
        guided = wide[1] + (wide[0] - wide[1]) * self.guidance
        least = guided.topk(self.top_k).values[-1]
        noise = -torch.empty_like(guided).exponential_().log()
        return torch.where(guided < least, -torch.inf, guided + noise).argmax(-1, keepdim=True)
