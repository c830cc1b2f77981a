"""A target's passes as one C++ program each: all layers, the final norm and the head in one call.

On a CPU a pass of a small model is mostly dispatch, and of a larger one it waits for weights: here weights stand in the
order in which they are read, and nothing is dispatched. A row's logits are the same bits in every tree, window and
batch (see `pass.cpp`), so that exact methods make plain decoding's picture code for code, in fp32 and in bf16.
"""

import ctypes
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.decoding.runners import is_run_by, make_eager, mark
from lantern.kernels.build import library
from lantern.kernels.draws import draws, fused_uniforms
from lantern.kernels.linear import linear
from lantern.kernels.packed import (
    LANES,
    PANEL,
    Arena,
    LayerTold,
    ModelTold,
    PackedLayer,
    PassTold,
    check_weights,
    kind_of,
    told,
)
from lantern.models.llamagen.transformer import Scores


def fuse_target(target: nn.Module) -> None:
    """Fuses a target's passes over an fp32 cache in place; other passes are eager. Twice is once.

    To be called again when weights have changed, as `Parts.generate` does. ValueError for a target that is not on a
    CPU, for weights that are not in fp32, bf16 or torchao's int8, for widths that are no multiples of 32
    (heads and gates: 16), and where there is no C++ compiler.
    """
    if is_run_by(target, "fused"):
        return
    make_eager(target)
    fused, eager = FusedPass(target), MethodType(type(target).forward, target)

    def forward(inputs: Tensor, positions: Tensor, mask: Tensor | None = None, **how: Any) -> Any:
        cache = how.get("cache")
        if mask is None or cache is None or cache.buffer.dtype != torch.float32:
            return eager(inputs, positions, mask, **how)
        return fused(inputs, positions, mask, **how)

    def fused_head(features: Tensor) -> Tensor:
        return fused.head(features)

    target.forward, target.draft_head = forward, fused_head  # type: ignore[assignment]
    target.is_fused, target.fused_pass = True, fused  # type: ignore[assignment]
    target.draws, target.make_uniforms = draws, fused_uniforms  # type: ignore[assignment]
    mark(target, "fused")


class FusedPass:
    """A target's weights, packed, and the call that runs a pass over them.

    Where `spent` is a float64 tensor (threads, PARTS), passes add the seconds that each thread spent on each part.
    """

    def __init__(self, target: Any) -> None:
        config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        check(target)
        self.call = library().lantern_pass
        self.dim, self.vocab = config.dim, config.vocab_size
        self.spent: Tensor | None = None
        arena = Arena.for_module(target)
        # all that pass.cpp is told the place of
        self._layers = [PackedLayer.of(block, arena) for block in target.layers]
        self._norm, self._head = arena.wide(target.norm.weight), arena.panels(target.output.weight)
        self._rope = target.rope.float().clone()
        layers = (LayerTold * config.n_layer)(*(told(layer.tensors) for layer in self._layers))
        hidden = target.layers[0].feed_forward.w2.weight.shape[1]
        kind = kind_of(self._head, *(panels for layer in self._layers for panels in layer.linears))
        shape = (config.dim, config.n_head, config.n_layer, hidden, config.vocab_size, kind)
        places = (tensor.data_ptr() for tensor in (self._norm, self._head, self._rope))
        self.model = ModelTold(*shape, config.norm_eps, layers, *places)

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
                PassTold(
                    *(rows, nodes, cache.slots, torch.get_num_threads(), len(taps)),
                    *(inputs.data_ptr(), positions.data_ptr(), places.data_ptr(), mask.data_ptr()),
                    *(mask.stride(0), mask.stride(1), cache.buffer.data_ptr(), ctypes.addressof(tapped)),
                    *(None if fused is None else fused.data_ptr(), features.data_ptr(), logits.data_ptr()),
                    None if self.spent is None else self.spent.data_ptr(),
                )
            ),
        )
        return Scores(logits, features.to(self.dtype), None if fused is None else fused.to(self.dtype))

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """As `Transformer.head`, for drafters; passes over prompts keep the head that they had."""
        return linear(features, self._head, None, self.vocab)


def check(target: Any) -> None:
    """Refuses what `pass.cpp` is not written for."""
    config = target.config
    check_weights(target)
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
