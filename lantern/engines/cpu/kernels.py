"""The C++ library seen from torch: packed weights in the order in which `pass.cpp` reads them, argument structures, and
functions of tensors.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from lantern.core.sampling import Key, Purpose, Sampling
from lantern.core.types import Sampler
from lantern.core.weights import Int8Weight, is_quantized
from lantern.engines.cpu.build import library
from lantern.models.llamagen.transformer import RMSNorm

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


class PassArgs(ctypes.Structure):
    """`PassArgs` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "slots", "threads", "taps")),
        *((name, ctypes.c_void_p) for name in ("inputs", "positions", "places", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_node")),
        ("cache", ctypes.c_void_p),
        ("plane", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tapped", "fused", "features", "logits")),
    ]

    @classmethod
    def of(
        cls, taken: Sequence[Tensor], cache: Tensor, made: Sequence[Tensor | None], tapped: Any = None
    ) -> "PassArgs":
        """Return the arguments of a pass, whose tensors, and the numbers of `tapped` layers, must outlive them.

        `taken` are inputs, positions, places and mask, `cache` the keys and values of all layers, and `made` the fields
        from `fused` on.
        """
        inputs, _, _, mask = taken
        taps, address = (0, None) if tapped is None else (len(tapped), ctypes.addressof(tapped))
        return cls(
            *(*inputs.shape[:2], cache.shape[-2], torch.get_num_threads(), taps),
            *(tensor.data_ptr() for tensor in taken),
            *(mask.stride(0), mask.stride(1), cache.data_ptr(), cache.stride(0)),
            *(address, *(None if tensor is None else tensor.data_ptr() for tensor in made)),
        )


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of pass.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "inputs", "outputs", "threads", "kind")),
        *((name, ctypes.c_void_p) for name in ("a", "panels", "bias", "out")),
    ]


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of sampling.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("images", "rows", "nodes", "vocab", "tokens")),
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
        numbers, scales = (weight.qdata, weight.scale) if isinstance(weight, Int8Weight) else (weight.data, None)  # type: ignore[attr-defined]
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


class PackedLayer(NamedTuple):
    """The packed weights of a decoder layer, in the order of `LayerArgs`; norms that it lacks are None."""

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
        """The weights of its linears."""
        return (self.wqkv, self.wo, self.w13, self.w2)

    @property
    def addresses(self) -> LayerArgs:
        """The addresses of the weights."""
        return LayerArgs(*(None if tensor is None else tensor.data_ptr() for tensor in self))


def check_weights(module: nn.Module) -> None:
    """Raise ValueError for weights that `pass.cpp` cannot read."""
    weight = next(module.parameters())
    if weight.device.type != "cpu":
        raise ValueError(f"the cpu engine is for CPUs, the model is on {weight.device.type}: use another engine")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the cpu engine computes in fp32 or bf16, the model is in {weight.dtype}: choose one of them")
    weights = [linear.weight for linear in module.modules() if isinstance(linear, nn.Linear)]
    if any(is_quantized(weight) and not isinstance(weight, Int8Weight) for weight in weights):
        raise ValueError(
            "the cpu engine reads weights in full or in int8, these are quantized otherwise: use --engine eager or "
            "--weights int8"
        )


def linear(
    x: Float[Tensor, "*b k"], panels: Tensor, bias: Float[Tensor, " n"] | None, outputs: int
) -> Float[Tensor, "*b n"]:
    """Return x times a packed weight plus an fp32 bias, in fp32.

    Inputs are rounded to bf16 for a bf16 weight, and to 8-bit integers, one scale per row, for an int8 weight.
    """
    assert panels.shape[0] * PANEL == outputs and panels[0].numel() == size_of(panels, x.shape[-1]), (
        "inputs are not as wide as the weight"
    )
    out, a = x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32), x.float().contiguous()
    sizes = (a[..., 0].numel(), a.shape[-1], outputs, torch.get_num_threads(), kind_of(panels))
    places = (a.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    library().lantern_linear(ctypes.byref(LinearArgs(*sizes, *places)))
    return out


def layer(
    x: Float[Tensor, "b n c"],
    factors: Float[Tensor, "b n 3 1 half 2"],
    mask: Float[Tensor, "b n s"],
    cache: Float[Tensor, "2 b h s d"],
    places: Int[Tensor, " n"],
    weights: PackedLayer,
    eps: float,
) -> Float[Tensor, "b n c"]:
    """Run a decoder layer; its keys and values are written to slots `places` of an fp32 cache. The result is fp32."""
    rows, nodes, dim = x.shape
    heads = cache.shape[2]
    assert cache.is_contiguous()
    inputs, factors, places = x.float().contiguous(), factors.contiguous(), places.expand(rows, -1).contiguous()
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    # each node has three rotary factors: of query, key and value
    positions = torch.arange(0, 3 * rows * nodes, 3)
    out = torch.empty(rows, nodes, dim, dtype=torch.float32)
    only = (LayerArgs * 1)(weights.addresses)
    shape = (dim, heads, 1, len(weights.w13) * PANEL // 2, 0, kind_of(*weights.linears))
    model = ModelArgs(*shape, eps, only, None, None, factors.data_ptr())
    run = PassArgs.of((inputs, positions, places, mask), cache, (None, out, None))
    library().lantern_pass(ctypes.byref(model), ctypes.byref(run))
    return out


def sampler_of(sampling: Sampling, noise: Any) -> Sampler | None:
    """Return the sampler of `Target.sampler`, whose tokens have the noise of `noise.gumbel_table`; None for top-p."""
    if sampling.top_p < 1:
        return None
    last = 1 << 30  # interval and top-k are 32-bit integers in C++
    counts = (min(sampling.top_k, last), min(sampling.guidance_interval, last))
    scales = (float(sampling.guidance), float(sampling.temperature))

    def best(
        logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"], *, width: int = 1, purpose: int = Purpose.TARGET
    ) -> Int[Tensor, "b n k"]:
        images, rows, nodes, vocab = logits.shape
        logits, places, table = logits.float().contiguous(), places.contiguous(), noise.gumbel_table(purpose)
        assert vocab % LANES == 0, f"{vocab} tokens, expected a multiple of {LANES}"
        tokens = 0
        if table is not None:
            assert table.is_contiguous() and table.shape[::2] == (images, vocab), "noise of other images or tokens"
            tokens = table.shape[1]
            places = places.clamp(0, tokens - 1)
        sampled = places.new_empty(images, nodes, width)
        sizes = (images, rows, nodes, vocab, tokens, *counts, width, torch.get_num_threads())
        addresses = (None if one is None else one.data_ptr() for one in (logits, places, table, sampled))
        library().lantern_sample(ctypes.byref(SampleArgs(*sizes, *scales, *addresses)))
        return sampled

    return best


def uniforms(
    key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, " n"], out: Float64[Tensor, "b n count"]
) -> None:
    """Write the numbers of `sampling.random_uniforms`."""
    assert out.is_contiguous()
    given = [tensor.contiguous() for tensor in (key.low, key.high, images, positions)]
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, out))
    library().lantern_uniforms(*map(ctypes.c_int32, (*out.shape, torch.get_num_threads())), *places)
