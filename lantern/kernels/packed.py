"""Weights in the order in which `pass.cpp` reads them, and the structures in which it is told where they are."""

import contextlib
import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

PANEL, LANES = 32, 16
ROOM = 64  # bytes of a cache line, at which every tensor begins
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # of weights; in int8 they are bytes
HEAD, GROUP = 8 * PANEL, 64  # bytes before a panel in int8; its inputs are a multiple


class LayerTold(ctypes.Structure):
    """`Layer` of pass.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm", "wqkv", "wo", "w13", "w2")]


class ModelTold(ctypes.Structure):
    """`Model` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dim", "heads", "layers", "hidden", "vocab", "kind")),
        ("eps", ctypes.c_float),
        ("layer", ctypes.POINTER(LayerTold)),
        *((name, ctypes.c_void_p) for name in ("norm", "head", "rope")),
    ]


# what the time of a pass is told of, in the order of pass.cpp; wait: for the other threads
PARTS = ("norm", "qkv", "attention", "out", "gate", "down", "head", "wait")


class PassTold(ctypes.Structure):
    """`Pass` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "slots", "threads", "taps")),
        *((name, ctypes.c_void_p) for name in ("inputs", "positions", "places", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_node")),
        *((name, ctypes.c_void_p) for name in ("cache", "tapped", "fused", "features", "logits", "spent")),
    ]


class LinearTold(ctypes.Structure):
    """`Linear` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "inputs", "outputs", "threads", "kind")),
        *((name, ctypes.c_void_p) for name in ("a", "panels", "bias", "out")),
    ]


class DrawsTold(ctypes.Structure):
    """`Draws` of draws.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("images", "rows", "nodes", "vocab", "codes")),
        *((name, ctypes.c_int32) for name in ("top_k", "interval", "width", "threads")),
        *((name, ctypes.c_float) for name in ("guidance", "temperature")),
        *((name, ctypes.c_void_p) for name in ("logits", "places", "noise", "drawn")),
    ]


class Arena:
    """Memory for copies of tensors, in huge pages where there are any: reading then waits less for addresses."""

    def __init__(self, size: int) -> None:
        private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # shared ones have no huge pages
        pages = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing more
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0

    @classmethod
    def for_module(cls, module: nn.Module) -> "Arena":
        """Room for all weights of a module, those that are not packed in fp32."""
        return cls(sum(ROOM + max(p.element_size(), 4) * p.numel() for p in module.parameters()))

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, row by row."""
        begun, count = -(-self._used // ROOM) * ROOM, tensor.numel() * tensor.element_size()
        self._used = begun + count
        place = self.memory[begun : self._used].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor.detach())

    def wide(self, tensor: Tensor) -> Tensor:
        """A copy in fp32."""
        return self.keep(tensor.float())

    def panels(self, weight: Float[Tensor, "n k"], order: Int[Tensor, " n"] | None = None) -> Tensor:
        """32 outputs after another; of each all inputs, in bf16 two by two, in int8 four by four. `order`: of outputs.

        In int8 zeros fill the inputs up, and 32 scales and the sums of 32 outputs' weights come first.
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
    """The one kind of some packed weights; ValueError where they are of several."""
    kinds = {KINDS[tensor.dtype] for tensor in panels}
    if len(kinds) > 1:
        raise ValueError("fused passes read all weights of a model in 8 bits or none, here are both: quantize them all")
    return kinds.pop()


def size_of(panels: Tensor, inputs: int) -> int:
    """How many numbers a panel of so many inputs has."""
    return HEAD + PANEL * (inputs + -inputs % GROUP) if panels.dtype == torch.uint8 else PANEL * inputs


@dataclass(frozen=True)
class PackedLayer:
    """The weights of a decoder layer; norms that it has not are None."""

    attention_norm: Tensor | None
    ffn_norm: Tensor
    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor

    @classmethod
    def of(cls, block: Any, arena: Arena) -> "PackedLayer":
        """Of a `Block` or an `EagleLayer`."""
        attention, feed = block.attention, block.feed_forward
        woven = torch.arange(feed.w13.out_features).unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten()
        entry = getattr(block.attention_norm, "weight", None)
        return cls(
            None if entry is None else arena.wide(entry),
            arena.wide(block.ffn_norm.weight),
            arena.panels(attention.wqkv.weight),
            arena.panels(attention.wo.weight),
            arena.panels(feed.w13.weight, woven),
            arena.panels(feed.w2.weight),
        )

    @property
    def linears(self) -> tuple[Tensor, ...]:
        """The weights of its linears."""
        return (self.wqkv, self.wo, self.w13, self.w2)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of `LayerTold`."""
        return (self.attention_norm, self.ffn_norm, *self.linears)


def told(tensors: tuple[Tensor | None, ...]) -> LayerTold:
    """Where the weights of a layer are."""
    return LayerTold(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def check_weights(module: nn.Module) -> None:
    """Refuses weights that `pass.cpp` cannot read: ValueError says what they are."""
    weight = next(module.parameters())
    if weight.device.type != "cpu":
        raise ValueError(f"fused passes are for CPUs, the model is on {weight.device.type}: leave fused out")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"fused passes compute in fp32 or bf16, got {weight.dtype}: choose one of them")
    weights = [linear.weight for linear in module.modules() if isinstance(linear, nn.Linear)]
    if any(type(weight.data) is not Tensor and not has_eight_bits(weight) for weight in weights):
        raise ValueError(
            "fused passes read weights as they are or in 8 bits, these are quantized otherwise: leave fused out, or "
            "choose int8"
        )


def has_eight_bits(weight: Tensor) -> bool:
    """Whether a weight is torchao's in int8 with a scale an output."""
    torchao: Any = sys.modules.get("torchao.quantization")  # who has not imported it has no such weight
    kind = () if torchao is None else torchao.Int8Tensor
    return isinstance(weight, kind) and getattr(weight, "scale").numel() == len(weight)  # noqa: B009 - of torchao's
