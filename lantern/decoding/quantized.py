"""A target with 4-bit or 8-bit weights, through torchao: decoding is then exact with respect to that target.

Weight-only. In 4 bits the linears of the layers hold integers in groups of 32 with a scale each; on a GPU (bf16)
torchao's packed kernels read a quarter of the bytes, on a CPU weights are unpacked in every pass, which saves memory
and no time. In 8 bits those of the layers and the head hold integers with one scale an output, which fused passes read
as they are. Embeddings, norms and the caption projection stay as they were, and so does the head in 4 bits.
"""

import copy
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import nn

from lantern.decoding.runners import weights_of

GROUP = 32


def quantized(target: nn.Module, bits: int = 4, parts: Collection[str] = ("layers", "output")) -> nn.Module:
    """A copy of a target, or of a drafter, with weights in so many `bits`, 4 or 8; in 8 those of some `parts`.

    What has such weights already is given back. A copy is made once for each original, which stays as it was, and anew
    when its weights have changed; they share nothing. ValueError for widths that are no whole groups of 4 bits, and
    where torchao is not installed.
    """
    if "_bits" in vars(target) and target._bits == bits:
        return target
    weights = weights_of(target)
    made_of, made = target.__dict__.get(f"_int{bits}", (None, None))
    if made_of != weights:
        if find_spec("torchao") is None:
            raise ValueError(f"{bits}-bit weights need torchao, which is not installed: pip install torchao")
        if bits == 4:
            check_widths(target)
        made = copy.deepcopy(target).requires_grad_(False)
        if bits == 4:
            _quantize_4(made.get_submodule("layers"))
        else:
            _quantize_8(made, parts)
        made.__dict__["_bits"] = bits
        # Past nn.Module's own bookkeeping, which would make it a part of the target.
        target.__dict__[f"_int{bits}"] = weights, made
    return made


def check_widths(target: nn.Module) -> None:
    """Refuses linears whose inputs are not whole groups, which torchao would leave alone without a word."""
    for name, module in target.get_submodule("layers").named_modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP:
            raise ValueError(
                f"layers.{name} has {module.in_features} inputs, wanted a multiple of {GROUP} to store it in 4 bits"
            )


def _quantize_8(module: nn.Module, parts: Collection[str]) -> None:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        def is_meant(linear: nn.Module, name: str) -> bool:
            return isinstance(linear, nn.Linear) and name.split(".")[0] in parts

        quantize_(module, Int8WeightOnlyConfig(), filter_fn=is_meant)


def _quantize_4(layers: nn.Module) -> None:
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
