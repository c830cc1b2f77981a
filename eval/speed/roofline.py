"""The roofline: the least time of a pass, from the bytes that it reads and the bandwidth of a copy."""

from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lantern.core.prepared import original
from lantern.decoding.statistics import now
from lantern.eval.speed.contenders import Contender
from lantern.eval.speed.race import rounded

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
REPEATS = 9
# tables of which a pass reads only a few rows
TABLES = ("tok_embeddings.", "cls_embedding.")


def copy_bandwidth(device: torch.device, *, size: int | None = None) -> float:
    """Return the bandwidth in GB/s (read and written bytes) of copying a tensor larger than any cache."""
    count = size or COPY_BYTES.get(device.type, 1 << 28)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        begin = now(device)
        target.copy_(source)
        seconds.append(now(device) - begin)
    return 2 * count / median(seconds[1:]) / 1e9


def pass_bytes(target: nn.Module, *, rows: int, nodes: int = 1, cached: int | None = None) -> int:
    """Return the bytes that a pass reads: weights without embedding tables, and keys and values of `cached` token
    slots.

    `cached` is by default all slots of an image. The cache of a CPU is in fp32 for every dtype.
    """
    config: Any = target.config
    weights = sum(stored_bytes(value) for name, value in target.named_parameters() if not name.startswith(TABLES))
    norm, slots = target.get_parameter("norm.weight"), config.block_size if cached is None else cached
    width = 4 if norm.device.type == "cpu" else norm.dtype.itemsize
    return weights + 2 * config.n_layer * rows * (slots + nodes) * config.dim * width


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; for a quantised tensor, those of its inner tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])


def roofline(contender: Contender, *, rows: int, copy_gbps: float, step_seconds: float) -> dict[str, float]:
    """Return the least milliseconds of a pass (`floor_ms`) and its share of a step's time (`roofline`), for JSON.

    A pass must at least read the weights and, on average over an image, half of the keys and values; at the bandwidth
    of a copy this takes `floor_ms`. Weights that stay in a processor's cache can be read faster, and the share then
    exceeds 1. The step's time includes drafting and verification. Empty for a target that is not LlamaGen's.
    """
    target, drafter = original(contender.parts.target), contender.parts.drafter
    if not isinstance(target, nn.Module) or "norm.weight" not in dict(target.named_parameters()):
        return {}
    nodes = 1 if drafter is None else drafter.max_nodes
    cached = contender.parts.target.config.block_size // 2
    seconds = pass_bytes(target, rows=rows, nodes=nodes, cached=cached) / copy_gbps / 1e9
    return {"floor_ms": rounded(1e3 * seconds), "roofline": rounded(seconds / max(step_seconds, 1e-12))}
