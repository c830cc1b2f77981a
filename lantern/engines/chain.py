"""Passes over chains of nodes in the middle of an image, to time and to try them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.types import Scores, Target
from lantern.decoding.cache import StaticCache


def waves(count: int, *, device: torch.device, begin: int = 0) -> Float[Tensor, " n"]:
    """Return numbers between -1 and 1 without an order, and without touching a random generator."""
    return torch.arange(begin, begin + count, device=device).mul(0.7391).sin()


class Chain:
    """A chain of n nodes of one image, with half of the image in the cache: zeros, or random numbers."""

    def __init__(self, target: Target, rows: int, nodes: int, *, is_random: bool = False, is_fp8: bool = False) -> None:
        config: Any = target.config
        weight, self.nodes = target.tok_embeddings.weight, nodes
        device, self.known = weight.device, (config.block_size - nodes) // 2
        self.cache = StaticCache(
            layers=config.n_layer,
            images=1,
            rows=rows,
            heads=config.n_head,
            head_dim=config.head_dim,
            prefix=1,
            tokens=config.block_size,
            stage=nodes,
            dtype=config.cache_dtype(device, weight.dtype),
            device=device,
            columns=config.raster.columns if config.raster.newlines else 0,
            is_fp8=is_fp8,
        )
        if is_random:
            for number, layer in enumerate(self.cache.buffer):
                layer.copy_(self.cache.stored(waves(layer.numel(), device=device, begin=number)).view_as(layer))
            self.cache.buffer[0::2, :, :, 0] = 0  # LlamaGen's prompts are values without keys
        size = (rows, nodes, self.cache.slots)
        self.mask = torch.full(size, -torch.inf, dtype=self.cache.dtype, device=device)
        self.mask[..., : 1 + self.known] = 0.0
        self.cache.first.fill_(1)  # the prompt has one token
        staged = torch.full((nodes, nodes), -torch.inf, dtype=torch.float32, device=device).triu(1)
        self.mask[..., self.cache.first_stage_slot :] = staged
        steps = torch.arange(nodes, device=device).expand(rows, -1)
        self.inputs = target.tok_embeddings(steps % config.vocab_size)
        self.positions = steps + self.known + config.cls_token_num
        self.slots = steps + self.cache.first_stage_slot

    def run(self, target: Target, nodes: int | None = None) -> Scores:
        """Return the scores of the first nodes, by default of all."""
        at = slice(nodes)
        how: dict[str, Any] = {"cache": self.cache, "slots": self.slots[:, at]}
        return target(self.inputs[:, at], self.positions[:, at], self.mask[:, at], **how)

    def run_alone(self, target: Target, node: int) -> Scores:
        """Return the scores of one node, after committing those before it, which the last run has staged."""
        cache, begin = self.cache, 1 + self.known
        staged = slice(cache.first_stage_slot, cache.first_stage_slot + node)
        cache.buffer[..., begin : begin + node, :] = cache.buffer[..., staged, :].clone()
        mask = torch.full_like(self.mask[:, :1], -torch.inf)
        mask[..., : begin + node] = mask[..., cache.first_stage_slot] = 0.0
        at = slice(node, node + 1)
        how: dict[str, Any] = {"cache": cache, "slots": self.slots[:, :1]}
        return target(self.inputs[:, at], self.positions[:, at], mask, **how)


def passes_of(target: Target, rows: int, nodes: Sequence[int]) -> dict[int, Callable[[], Scores]]:
    """Return passes over chains of n tokens, with half of the image in the cache."""
    chain = Chain(target, rows, max(nodes))
    return {n: partial(chain.run, target, n) for n in nodes}
