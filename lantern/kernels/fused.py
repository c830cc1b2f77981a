"""A target's passes as one C++ program each: all layers, the final norm and the head in one call.

On a CPU a pass of a small model is mostly dispatch, and of a larger one it waits for weights: here weights stand in the
order in which they are read, and nothing is dispatched. A row's logits are the same bits in every tree, window and
batch (see `pass.cpp`), so that exact methods make plain decoding's picture code for code, in fp32 and in bf16.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.kernels.build import library
from lantern.models.llamagen.transformer import Scores

PANEL, LANES = 32, 16
ROOM = 64  # bytes of a cache line, at which every tensor begins


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm", "wqkv", "wo", "w13", "w2")]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dim", "heads", "layers", "hidden", "vocab", "is_half")),
        ("eps", ctypes.c_float),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("norm", "head", "rope")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "nodes", "slots", "threads", "taps")),
        *((name, ctypes.c_void_p) for name in ("inputs", "positions", "places", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_row", "mask_node")),
        *((name, ctypes.c_void_p) for name in ("cache", "tapped", "fused", "features", "logits")),
    ]


def fuse_target(target: nn.Module) -> None:
    """Fuses a target's passes over an fp32 cache in place; other passes are eager. Twice is once.

    Weights that change afterwards are not seen. ValueError for a target that is not on a CPU, for other dtypes than
    fp32 and bf16, for widths that are no multiples of 32 (heads and gates: 16), and where there is no C++ compiler.
    """
    if getattr(target, "is_fused", False):
        return
    fused, eager = FusedPass(target), MethodType(type(target).forward, target)

    def forward(inputs: Tensor, positions: Tensor, mask: Tensor | None = None, **told: Any) -> Any:
        cache = told.get("cache")
        if mask is None or cache is None or cache.buffer.dtype != torch.float32:
            return eager(inputs, positions, mask, **told)
        return fused(inputs, positions, mask, **told)

    target.forward = forward
    target.is_fused, target._is_compiled = True, False  # type: ignore[assignment]


class FusedPass:
    """A target's weights, packed, and the call that runs a pass over them."""

    def __init__(self, target: Any) -> None:
        config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        check(target)
        self.call = library().lantern_pass
        self.dim, self.vocab = config.dim, config.vocab_size
        self._arena = Arena(sum(ROOM + max(p.element_size(), 4) * p.numel() for p in target.parameters()))
        layers = (_Layer * config.n_layer)(*(self._layer(block) for block in target.layers))
        hidden = target.layers[0].feed_forward.w2.weight.shape[1]
        is_half = self.dtype == torch.bfloat16
        shape = (config.dim, config.n_head, config.n_layer, hidden, config.vocab_size, is_half)
        norm, head = self._plain(target.norm.weight), self._panels(target.output.weight)
        self._rope = target.rope.float().clone()
        self.model = _Model(*shape, config.norm_eps, layers, norm, head, self._rope.data_ptr())

    def __call__(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Float[Tensor, "b n s"],
        *,
        cache: Any,
        slots: Int[Tensor, "b n"],
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """As `Transformer.forward` with a `StaticCache` in fp32."""
        rows, nodes = inputs.shape[:2]
        inputs, positions, places = inputs.float().contiguous(), positions.contiguous(), slots[0].contiguous()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        logits = torch.empty(rows, nodes, self.vocab)
        features = torch.empty(rows, nodes, self.dim)
        fused = torch.empty(rows, nodes, len(taps) * self.dim) if taps else None
        tapped = (ctypes.c_int32 * len(taps))(*taps)
        self.call(
            ctypes.byref(self.model),
            ctypes.byref(
                _Pass(
                    *(rows, nodes, cache.slots, torch.get_num_threads(), len(taps)),
                    *(inputs.data_ptr(), positions.data_ptr(), places.data_ptr(), mask.data_ptr()),
                    *(mask.stride(0), mask.stride(1), cache.buffer.data_ptr(), ctypes.addressof(tapped)),
                    *(None if fused is None else fused.data_ptr(), features.data_ptr(), logits.data_ptr()),
                )
            ),
        )
        return Scores(logits, features.to(self.dtype), None if fused is None else fused.to(self.dtype))

    def _layer(self, block: Any) -> _Layer:
        attention, feed = block.attention, block.feed_forward
        gates, ups = feed.w13.weight.chunk(2)
        woven = torch.stack([gates.unflatten(0, (-1, LANES)), ups.unflatten(0, (-1, LANES))], dim=1)
        norms = [self._plain(norm.weight) for norm in (block.attention_norm, block.ffn_norm)]
        weights = (attention.wqkv.weight, attention.wo.weight, woven.flatten(0, 2), feed.w2.weight)
        return _Layer(*norms, *map(self._panels, weights))

    def _panels(self, weight: Float[Tensor, "n k"]) -> int:
        """32 outputs after another; of each all inputs, in bf16 two by two."""
        if weight.dtype == torch.float32:
            return self._arena.keep(weight.unflatten(0, (-1, PANEL)).transpose(1, 2))
        pairs = weight.unflatten(1, (-1, 2)).unflatten(0, (-1, PANEL))
        return self._arena.keep(pairs.transpose(1, 2))

    def _plain(self, tensor: Tensor) -> int:
        return self._arena.keep(tensor.float())


class Arena:
    """Memory for copies of tensors, in huge pages where there are any: reading then waits less for addresses."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing more
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> int:
        """Copies a tensor, row by row; the address."""
        begun, count = -(-self._used // ROOM) * ROOM, tensor.numel() * tensor.element_size()
        self._used = begun + count
        place = self.memory[begun : self._used].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach())
        return place.data_ptr()


def check(target: Any) -> None:
    """Refuses what `pass.cpp` is not written for."""
    config, weight = target.config, target.tok_embeddings.weight
    if weight.device.type != "cpu":
        raise ValueError(f"fused passes are for CPUs, the model is on {weight.device.type}: leave fused out")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"fused passes compute in fp32 or bf16, got {weight.dtype}: choose one of them")
    if any(type(module.weight.data) is not Tensor for module in target.modules() if isinstance(module, nn.Linear)):
        raise ValueError("fused passes read weights as they are, these are quantized: leave one of the two out")
    hidden = target.layers[0].feed_forward.w2.weight.shape[1]
    widths: Sequence[tuple[str, int, int]] = (
        ("dim", config.dim, PANEL),
        ("vocab_size", config.vocab_size, PANEL),
        ("width of a head", config.head_dim, LANES),
        ("width of the feed-forward layer", hidden, LANES),
    )
    for name, width, wanted in widths:
        if width % wanted:
            raise ValueError(
                f"the model's {name} is {width}, fused passes want a multiple of {wanted}: leave fused out"
            )
