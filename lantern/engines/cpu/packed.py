"""Weights in the order in which `pass.cpp` reads them, and the argument structures of its functions."""

import contextlib
import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.layers import RMSNorm

PANEL, LANES = 32, 16
LINE = 64  # bytes of a cache line, at which every tensor begins
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # of weights; in int8 they are bytes
HEAD, GROUP = 8 * PANEL, 64  # int8: bytes before a panel; its inputs are padded to a multiple of GROUP


class LayerArgs(ctypes.Structure):
    """`Layer` of pass.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm", "wqkv", "wo", "w13", "w2")]


class ModelArgs(ctypes.Structure):
    """`Model` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dim", "heads", "layers", "hidden", "vocab", "kind")),
        ("eps", ctypes.c_float),
        ("layer", ctypes.POINTER(LayerArgs)),
        *((name, ctypes.c_void_p) for name in ("norm", "head", "rope")),
    ]


# parts of the time of a pass, in the order of pass.cpp; wait: for the other threads
PARTS = ("norm", "qkv", "attention", "out", "gate", "down", "head", "wait")


class PassArgs(ctypes.Structure):
    """`PassArgs` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "slots", "threads", "taps")),
        *((name, ctypes.c_void_p) for name in ("inputs", "positions", "places", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_node")),
        *((name, ctypes.c_void_p) for name in ("cache", "tapped", "fused", "features", "logits", "spent")),
    ]


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "inputs", "outputs", "threads", "kind")),
        *((name, ctypes.c_void_p) for name in ("a", "panels", "bias", "out")),
    ]


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of sampling.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("images", "rows", "nodes", "vocab", "codes")),
        *((name, ctypes.c_int32) for name in ("top_k", "interval", "width", "threads")),
        *((name, ctypes.c_float) for name in ("guidance", "temperature")),
        *((name, ctypes.c_void_p) for name in ("logits", "places", "noise", "sampled")),
    ]


class Arena:
    """Memory for copies of tensors, in huge pages if the system has them, which saves address translations."""

    def __init__(self, size: int) -> None:
        private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # shared ones have no huge pages
        pages = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0

    @classmethod
    def for_module(cls, module: nn.Module) -> "Arena":
        """Return an arena for all weights of a module; those that are not packed are in fp32."""
        return cls(sum(LINE + max(p.element_size(), 4) * p.numel() for p in module.parameters()))

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        begun, count = -(-self._used // LINE) * LINE, tensor.numel() * tensor.element_size()
        self._used = begun + count
        place = self.memory[begun : self._used].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor.detach())

    def wide(self, tensor: Tensor) -> Tensor:
        """Return a copy in fp32."""
        return self.keep(tensor.float())

    def panels(self, weight: Float[Tensor, "n k"], order: Int[Tensor, " n"] | None = None) -> Tensor:
        """Return a weight as panels of 32 outputs with all inputs: in bf16 in groups of two, in int8 of four.

        `order` permutes the outputs. In int8 inputs are padded with zeros, and a panel starts with 32 scales and the
        sums of the 32 outputs' weights.
        """
        numbers, scales = (weight.qdata, weight.scale) if has_eight_bits(weight) else (weight.data, None)  # type: ignore[attr-defined]
        if order is not None:
            numbers, scales = numbers[order], None if scales is None else scales[order]
        if scales is None and weight.dtype == torch.float32:
            return self.keep(numbers.unflatten(0, (-1, PANEL)).transpose(1, 2))
        if scales is None:
            return self.keep(numbers.unflatten(1, (-1, 2)).unflatten(0, (-1, PANEL)).transpose(1, 2))
        numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % GROUP))
        fours = numbers.unflatten(1, (-1, 4)).unflatten(0, (-1, PANEL)).transpose(1, 2)
        sums = numbers.sum(1, dtype=torch.int32)
        parts = (scales.float().view(-1, PANEL), sums.view(-1, PANEL), fours.flatten(1))
        return self.keep(torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1))


def kind_of(*panels: Tensor) -> int:
    """Return the kind of packed weights; ValueError if there are several."""
    kinds = {KINDS[tensor.dtype] for tensor in panels}
    if len(kinds) > 1:
        raise ValueError("the cpu engine reads all weights in 8 bits or none, this model has both: quantize all")
    return kinds.pop()


def size_of(panels: Tensor, inputs: int) -> int:
    """Return the elements of a panel of so many inputs."""
    return HEAD + PANEL * (inputs + -inputs % GROUP) if panels.dtype == torch.uint8 else PANEL * inputs


@dataclass(frozen=True)
class PackedLayer:
    """The packed weights of a decoder layer; norms that it lacks are None."""

    attention_norm: Tensor | None
    ffn_norm: Tensor
    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor

    @classmethod
    def of(cls, block: Any, arena: Arena) -> "PackedLayer":
        """Pack a `Block` or an `EagleLayer`."""
        attention, feed = block.attention, block.feed_forward
        interleaved = torch.arange(feed.w13.out_features).unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten()
        return cls(
            arena.wide(block.attention_norm.weight) if isinstance(block.attention_norm, RMSNorm) else None,
            arena.wide(block.ffn_norm.weight),
            arena.panels(attention.wqkv.weight),
            arena.panels(attention.wo.weight),
            arena.panels(feed.w13.weight, interleaved),
            arena.panels(feed.w2.weight),
        )

    @property
    def linears(self) -> tuple[Tensor, ...]:
        """Return the weights of its linears."""
        return (self.wqkv, self.wo, self.w13, self.w2)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all weights in the order of `LayerArgs`."""
        return (self.attention_norm, self.ffn_norm, *self.linears)


def arguments(tensors: tuple[Tensor | None, ...]) -> LayerArgs:
    """Return the addresses of the weights of a layer."""
    return LayerArgs(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def check_weights(module: nn.Module) -> None:
    """Raise ValueError for weights that `pass.cpp` cannot read."""
    weight = next(module.parameters())
    if weight.device.type != "cpu":
        raise ValueError(f"the cpu engine is for CPUs, the model is on {weight.device.type}: use another engine")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the cpu engine computes in fp32 or bf16, the model is in {weight.dtype}: choose one of them")
    weights = [linear.weight for linear in module.modules() if isinstance(linear, nn.Linear)]
    if any(type(weight.data) is not Tensor and not has_eight_bits(weight) for weight in weights):
        raise ValueError(
            "the cpu engine reads weights in full or in int8, these are quantized otherwise: use --engine eager or "
            "--weights int8"
        )


def has_eight_bits(weight: Tensor) -> bool:
    """Return whether a weight is torchao's int8 with one scale per output."""
    torchao: Any = sys.modules.get("torchao.quantization")  # without the import there is no such weight
    kind = () if torchao is None else torchao.Int8Tensor
    return isinstance(weight, kind) and getattr(weight, "scale").numel() == len(weight)  # noqa: B009 - of torchao's
