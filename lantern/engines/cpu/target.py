"""A target whose pass is one C++ program: all layers, the final norm and the head in one call.

On a CPU a pass of a small model is mostly dispatch, and a pass of a larger one waits for weights. Here weights are
stored in the order in which they are read, and nothing is dispatched. The bits of a row's logits are the same in every
tree, window and batch (see `pass.cpp`), so exact methods give plain decoding's codes in fp32 and in bf16.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Sampler
from lantern.core.types import Scores as ScoresLike
from lantern.engines.cpu.build import library
from lantern.engines.cpu.linear import linear
from lantern.engines.cpu.packed import (
    LANES,
    PANEL,
    Arena,
    LayerArgs,
    ModelArgs,
    PackedLayer,
    PassArgs,
    arguments,
    check_weights,
    kind_of,
)
from lantern.engines.cpu.sampling import sampler_of, uniforms
from lantern.engines.prepared import PreparedTarget, WeightCache
from lantern.models.llamagen.transformer import Scores


class PackedPass:
    """A target's packed weights, and the call that runs a pass over them.

    If `spent` is a float64 tensor (threads, PARTS), passes add the seconds that each thread spent on each part.
    """

    def __init__(self, target: Any) -> None:
        config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        check(target)
        self.call = library().lantern_pass
        self.dim, self.vocab = config.dim, config.vocab_size
        self.spent: Tensor | None = None
        arena = Arena.for_module(target)
        # the tensors whose addresses pass.cpp holds
        self._layers = [PackedLayer.of(block, arena) for block in target.layers]
        self._norm, self._head = arena.wide(target.norm.weight), arena.panels(target.output.weight)
        self._rope = target.rope.float().clone()
        layers = (LayerArgs * config.n_layer)(*(arguments(layer.tensors) for layer in self._layers))
        hidden = target.layers[0].feed_forward.w2.weight.shape[1]
        kind = kind_of(self._head, *(panels for layer in self._layers for panels in layer.linears))
        shape = (config.dim, config.n_head, config.n_layer, hidden, config.vocab_size, kind)
        places = (tensor.data_ptr() for tensor in (self._norm, self._head, self._rope))
        self.model = ModelArgs(*shape, config.norm_eps, layers, *places)

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
        """Score inputs, as `Transformer.forward` with a `StaticCache` in fp32."""
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
                PassArgs(
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
        """Apply the head, as `Transformer.head`."""
        return linear(features, self._head, None, self.vocab)


_PASSES = WeightCache(PackedPass)


class CpuTarget(PreparedTarget):
    """A target that scores inputs in C++ if its cache is in fp32, and otherwise by torch, which also reads prompts."""

    is_batch_invariant = True

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.make_uniforms = uniforms
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights again if they have changed."""
        self.program = _PASSES.get(self.module)

    def forward(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> ScoresLike:
        """Score inputs, as `Target.__call__`."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != torch.float32:
            return self.module(inputs, positions, mask, cache=cache, slots=slots, taps=taps)
        return self.program(inputs, positions, mask, cache=cache, slots=slots, taps=taps)

    def draft_head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Apply the head for drafters, in C++."""
        return self.program.head(features)

    def sampler(self, sampling: Sampling, noise: Any) -> Sampler | None:
        """Return the sampler in C++, None for top-p."""
        return sampler_of(sampling, noise)


def check(target: Any) -> None:
    """Raise ValueError for a device, dtype, quantization or widths that `pass.cpp` does not support."""
    config = target.config
    check_weights(target)
    hidden = target.layers[0].feed_forward.w2.weight.shape[1]
    widths: Sequence[tuple[str, int, int]] = (
        ("dim", config.dim, PANEL),
        ("vocab_size", config.vocab_size, PANEL),
        ("width of a head", config.head_dim, LANES),
        ("width of the feed-forward layer", hidden, LANES),
    )
    for name, width, expected in widths:
        if width % expected:
            raise ValueError(
                f"the model's {name} is {width}, the cpu engine needs a multiple of {expected}: use --engine eager"
            )
