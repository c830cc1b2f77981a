"""Weights in 8 or 4 bits: an option of loading, for the linears of LlamaGen's layers and, in 8 bits, its head.

Decoding is exact with respect to the quantized target. Only weights are quantized, by torchao. In 4 bits integers are
in groups of 32 with one scale each. On a GPU (bf16) torchao's packed kernels read a quarter of the bytes; on a CPU
weights are unpacked in every pass, which saves memory and no time. In 8 bits there is one scale per output, and the cpu
engine reads the integers as they are. Embeddings, norms and the caption projection are unchanged.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lantern.core.config import WEIGHTS, Weights, install_hint
from lantern.core.io import trim_memory

PARTS: dict[Weights, tuple[str, ...]] = {"full": (), "int8": ("layers", "output"), "int4": ("layers",)}
GROUP = 32
Module = TypeVar("Module", bound=nn.Module)


def check_kind(weights: str) -> None:
    """Raise ValueError for an unknown kind of weights, ImportError where torchao is needed and not installed."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}, expected one of {', '.join(WEIGHTS)}")
    if weights != "full" and find_spec("torchao") is None:
        raise ImportError(f"{weights} weights need torchao, which is not installed; {install_hint('quantized')}")


def kind_of(module: nn.Module) -> Weights:
    """Return the kind of a module's weights."""
    return vars(module).get("_weights", "full")


def marked(module: Module, weights: Weights) -> Module:
    """Return a module, of whose weights `kind_of` then knows the kind."""
    vars(module)["_weights"] = weights
    return module


def quantize(name: str, part: nn.Module, weights: Weights) -> None:
    """Quantize the linears of a part of a target in place; of parts that `weights` leaves full, none.

    ValueError for widths that are not multiples of a group (int4).
    """
    for inner, module in part.named_modules(prefix=name) if weights == "int4" else ():
        if isinstance(module, nn.Linear) and module.in_features % GROUP:  # which torchao would silently skip
            raise ValueError(
                f"{inner} has {module.in_features} inputs, expected a multiple of {GROUP} for 4-bit weights"
            )
    with _quiet():
        from torchao.quantization import (
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
            quantize_,
        )

        weight = next(part.parameters())
        if weights == "int8":
            config: Any = Int8WeightOnlyConfig()
        elif weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")  # type: ignore[arg-type]
        else:
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
        for linear in [module for module in part.modules() if isinstance(module, nn.Linear)]:
            quantize_(linear, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
            trim_memory()  # torchao takes many times the memory of a linear, for a moment


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is of a subclass of Tensor, as torchao's are."""
    return weight.data.__class__ is not Tensor


def has_eight_bits(weight: Tensor) -> bool:
    """Return whether a weight is torchao's int8 with one scale per output."""
    torchao: Any = sys.modules.get("torchao.quantization")  # without the import there is no such weight
    kind = () if torchao is None else torchao.Int8Tensor
    return isinstance(weight, kind) and getattr(weight, "scale").numel() == len(weight)  # noqa: B009 - of torchao's


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of torchao: its import logs which of its kernels this machine cannot use."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
