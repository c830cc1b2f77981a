"""A target with 4-bit weights, through torchao: decoding is then exact with respect to that target.

Weight-only: the linears of the layers hold 4-bit integers in groups of 32 with a scale each; embeddings, norms, the
caption projection and the head stay as they are. On a GPU (bf16) torchao's packed kernels read a quarter of the bytes;
on a CPU weights are unpacked in every pass, which saves memory and no time.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import nn

from lantern.decoding.runners import weights_of

GROUP = 32


def quantized(target: nn.Module) -> nn.Module:
    """A copy of the target with 4-bit weights, made once for each target, and anew when its weights have changed.

    The copy shares nothing with the original, which stays as it was. ValueError for widths that are no whole groups,
    and where torchao is not installed.
    """
    weights = weights_of(target)
    made_of, made = target.__dict__.get("_int4", (None, None))
    if made_of != weights:
        if find_spec("torchao") is None:
            raise ValueError("4-bit weights need torchao, which is not installed: pip install torchao")
        check_widths(target)
        made = copy.deepcopy(target).requires_grad_(False)
        _quantize(made.get_submodule("layers"))
        # Past nn.Module's own bookkeeping, which would make it a part of the target.
        target.__dict__["_int4"] = weights, made
    return made


def check_widths(target: nn.Module) -> None:
    """Refuses linears whose inputs are not whole groups, which torchao would leave alone without a word."""
    for name, module in target.get_submodule("layers").named_modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP:
            raise ValueError(
                f"layers.{name} has {module.in_features} inputs, wanted a multiple of {GROUP} to store it in 4 bits"
            )


def _quantize(layers: nn.Module) -> None:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        weight = next(layers.parameters())
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")  # type: ignore[arg-type]
        else:
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
        quantize_(layers, config)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Without warnings: importing torchao tells which of its kernels this machine cannot use."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
