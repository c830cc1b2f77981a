"""Weights in 8 or 4 bits: an option of loading, for the linears of LlamaGen's layers and, in 8 bits, its head.

Decoding is exact with respect to the quantized target. In 4 bits, by torchao, integers are in groups of 32 with one
scale each. On a GPU (bf16) torchao's packed kernels read a quarter of the bytes; on a CPU weights are unpacked in every
pass, which saves memory and no time. In 8 bits there is one scale per output; the cpu engine reads the integers as they
are, and rounds the inputs of its products to 8 bits too. They are those of torchao, whose import takes seconds and 160
MiB. Embeddings, norms and the caption projection are unchanged.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lantern.core.config import WEIGHTS, Weights, install_hint
from lantern.core.io import trim_memory

PARTS: dict[Weights, tuple[str, ...]] = {"full": (), "int8": ("layers", "output"), "int4": ("layers",)}
GROUP = 32
ROWS = 1024  # outputs that are quantized to 8 bits at once, since what is computed meanwhile is in fp32
BY_ROW = (Tensor.__getitem__, Tensor.clone, Tensor.contiguous, Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
Module = TypeVar("Module", bound=nn.Module)


class Int8Weight(Tensor):
    """The weight of a linear in 8-bit integers `qdata` with one `scale` per output, symmetric: qdata * scale.

    `dtype` is that of its products. It can be moved, copied and indexed by row. What loading needs is in
    `__torch_function__`, since torch imports sympy for the first `__torch_dispatch__`: 40 MiB.
    """

    qdata: Int8[Tensor, "n k"]
    scale: Float[Tensor, "n 1"]

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> "Int8Weight":
        """Return a tensor of this shape and dtype without memory of its own."""
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Float[Tensor, "n k"]) -> Self:
        """Quantize a weight: the largest value of a row becomes 127 or -128."""
        largest = torch.maximum(weight.amax(1, keepdim=True), -weight.amin(1, keepdim=True))
        scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()
        qdata = torch.empty_like(weight, dtype=torch.int8)
        for rows, factors, out in zip(weight.split(ROWS), (1 / scale).split(ROWS), qdata.split(ROWS), strict=True):
            out.copy_((rows * factors).round_().clamp_(-128, 127))
        return cls(qdata, scale, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and scales."""
        return self.qdata.nbytes + self.scale.nbytes

    def __repr__(self, **_: Any) -> str:
        return f"Int8Weight({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = made = cast(Self, nn.Parameter(self.clone(), requires_grad=False))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func not in BY_ROW:
            return super().__torch_function__(func, types, args, kwargs or {})
        weight, *more = args
        return cls(func(weight.qdata, *more), func(weight.scale, *more), weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            raise NotImplementedError(f"{func} is not defined for weights in 8 bits")
        (weight,), how = args, dict(kwargs)
        dtype = how.pop("dtype", None) or weight.dtype
        return cls(func(weight.qdata, **how), func(weight.scale, **how), dtype)


def _linear(x: Float[Tensor, "*b k"], weight: Int8Weight, bias: Tensor | None = None) -> Float[Tensor, "*b n"]:
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.qdata.T.to(x.dtype))
    out = (out * weight.scale.to(out.dtype).flatten()).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def check_kind(weights: str) -> None:
    """Raise ValueError for an unknown kind of weights, ImportError where torchao is needed and not installed."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}, expected one of {', '.join(WEIGHTS)}")
    if weights == "int4" and find_spec("torchao") is None:
        raise ImportError(f"int4 weights need torchao, which is not installed; {install_hint('quantized')}")


def kind_of(module: nn.Module) -> Weights:
    """Return the kind of a module's weights."""
    return vars(module).get("_weights", "full")


def marked(module: Module, weights: Weights) -> Module:
    """Return a module, of whose weights `kind_of` then knows the kind."""
    vars(module)["_weights"] = weights
    return module


def quantize(name: str, part: nn.Module, weights: Weights) -> None:
    """Quantize the linears of a part of a target in place; of parts that `weights` leaves full, none.

    ValueError for widths that are not multiples of a group (int4), and for parametrized weights.
    """
    linears = {inner: module for inner, module in part.named_modules(prefix=name) if isinstance(module, nn.Linear)}
    if (inner := next((inner for inner, linear in linears.items() if is_parametrized(linear)), None)) is not None:
        raise ValueError(
            f"the weight of {inner} is parametrized, so it is not quantized: merge it by remove_parametrizations, or "
            "use weights in full"
        )
    if weights == "int8":
        for linear in linears.values():
            linear.weight = nn.Parameter(Int8Weight.of(linear.weight), requires_grad=False)
        return
    for inner, linear in linears.items():
        if linear.in_features % GROUP:  # which torchao would silently skip
            raise ValueError(
                f"{inner} has {linear.in_features} inputs, expected a multiple of {GROUP} for 4-bit weights"
            )
    with _quiet():
        from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        weight = next(part.parameters())
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            config: Any = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")  # type: ignore[arg-type]
        else:
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
        for linear in linears.values():
            quantize_(linear, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
            trim_memory()  # torchao takes many times the memory of a linear, for a moment


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is of a subclass of Tensor, as `Int8Weight` and torchao's are."""
    return weight.data.__class__ is not Tensor


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
