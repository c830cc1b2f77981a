"""A drafter's layers and what joins its inputs, fused: its draft step then costs little beside the target's pass."""

import copy
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.decoding.quantized import quantized
from lantern.decoding.runners import weights_of
from lantern.drafters.eagle import Eagle, EagleLayer
from lantern.kernels.linear import layer, linear
from lantern.kernels.packed import LANES, PANEL, Arena, PackedLayer, check_weights


class FusedLinear(nn.Linear):
    """A linear that reads packed weights; results are in the dtype of the weights."""

    def __init__(self, of: nn.Linear, arena: Arena) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(of.__dict__)
        self._panels = arena.panels(of.weight)
        self._wide_bias = None if of.bias is None else arena.wide(of.bias)

    def forward(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:  # type: ignore[override]
        """As a linear."""
        return linear(x, self._panels, self._wide_bias, self.out_features).to(x.dtype)


class FusedLayer(EagleLayer):
    """A layer in one call where its cache is in fp32; otherwise as it was."""

    cache_dtype = torch.float32

    def __init__(self, of: EagleLayer, arena: Arena) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(of.__dict__)
        self._packed = PackedLayer.of(of, arena).tensors

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        turns: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """As `EagleLayer.forward`."""
        buffer = getattr(cache, "buffer", None)
        if mask is None or slots is None or buffer is None or buffer.dtype != self.cache_dtype:
            return super().forward(x, turns, mask, cache=cache, slots=slots)
        if mask.dtype == torch.bool:
            mask = torch.zeros(()).masked_fill(~mask, -torch.inf)
        own = buffer[2 * self.number : 2 * self.number + 2]
        return layer(x, turns, mask, own, slots[0], self._packed, self.ffn_norm.eps).to(x.dtype)


Module = TypeVar("Module", bound=nn.Module)
_FUSED: "WeakKeyDictionary[nn.Module, tuple[Any, nn.Module]]" = WeakKeyDictionary()  # of which weights, and what


def fused_drafter(module: Module, *, int8: bool = False) -> Module:
    """A drafter's module in which what `pass.cpp` is written for is fused; all else is shared with the one given.

    `int8`: all else is shared with a copy whose weights have 8 bits. Made once for each module, and anew when its
    weights have changed. Modules of other kinds are given back. ValueError for weights that are not on a CPU, and for
    other dtypes than fp32 and bf16.
    """
    if not isinstance(module, Eagle) or not _fits(module):
        return module
    drafter: Any = quantized(module, 8, ("layers", "fc")) if int8 else module
    weights = weights_of(drafter)
    made_of, twin = _FUSED.get(drafter, (None, None))
    if made_of != weights:
        check_weights(drafter)
        twin = _fused(drafter)
        _FUSED[drafter] = weights, twin
    return cast(Module, twin)


def _fused(module: Eagle) -> nn.Module:
    arena, twin = Arena.for_module(module), copy.copy(module)
    layers = [FusedLayer(of, arena) if type(of) is EagleLayer else of for of in module.layers]
    twin._modules = module._modules | {"layers": nn.ModuleList(layers)}
    if type(twin._modules.get("fc")) is nn.Linear:
        twin._modules["fc"] = FusedLinear(module.fc, arena)
    return twin


def _fits(module: Eagle) -> bool:
    """Whether widths are multiples of what is computed at a time."""
    config = module.config
    return not (config.dim % PANEL or config.dim // config.n_head % LANES or config.ffn_dim % LANES)
