"""A drafter's layers, and the linear that joins its inputs, in C++."""

import copy
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.weights import DraftLayer, WeightCache, left_out, quantized
from lantern.engines.cpu.kernels import LANES, PANEL, Arena, PackedLayer, check_weights, layer, linear


class PackedLinear(nn.Linear):
    """A linear with packed weights; the result has the dtype of the input."""

    def __init__(self, of: nn.Linear, arena: Arena) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(of.__dict__)
        self._panels = arena.panels(of.weight)
        self._wide_bias = None if of.bias is None else arena.wide(of.bias)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The packed weight, and the bias in fp32."""
        return self._panels, self._wide_bias

    def forward(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:  # type: ignore[override]
        """Apply the linear."""
        return linear(x, self._panels, self._wide_bias, self.out_features).to(x.dtype)


class PackedDrafterLayer(DraftLayer):
    """A layer as one call if its cache is in fp32; otherwise the original layer."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values: fp32, whatever the weights are."""
        return torch.float32

    def __init__(self, of: Any, arena: Arena) -> None:
        super().__init__()
        self.__dict__.update(of.__dict__)
        self._original = (of,)  # in a tuple, so that its weights are not registered twice
        self.weights = PackedLayer.of(of, arena)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Run the layer."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != self.cache_dtype:
            return self._original[0](x, factors, mask, cache=cache, slots=slots)
        if mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=torch.float32).masked_fill(~mask, -torch.inf)
        number, eps = self._original[0].number, self._original[0].ffn_norm.eps
        own = cache.buffer[2 * number : 2 * number + 2]
        return layer(x, factors, mask, own, slots[0], self.weights, eps).to(x.dtype)


Module = TypeVar("Module", bound=nn.Module)


def packed_drafter(module: Module, *, int8: bool = False) -> Module:
    """Return a drafter's module with packed layers; the rest is shared with the given module.

    With `int8` the rest is shared with a copy in 8 bits. The result is cached per module, and made again when its
    weights have changed. Modules of other kinds and widths are returned as they are. ValueError for weights that are
    not on a CPU, and for dtypes other than fp32 and bf16.
    """
    drafter: Any = module
    if not any(isinstance(child, DraftLayer) for child in module.modules()) or not _fits(drafter.config):
        return module
    drafter = quantized(module, "int8", ("layers", "fc")) if int8 else module
    return cast(Module, _PACKED.get(drafter))


def _packed(module: Any) -> nn.Module:
    check_weights(module)
    arena, twin = Arena.for_module(module), copy.copy(module)
    layers = [PackedDrafterLayer(of, arena) if of.is_packable and not left_out(of) else of for of in module.layers]
    twin._modules = module._modules | {"layers": nn.ModuleList(layers)}
    if isinstance(fc := twin._modules.get("fc"), nn.Linear) and not left_out(fc):
        twin._modules["fc"] = PackedLinear(module.fc, arena)
    return twin


def _fits(config: Any) -> bool:
    """Return whether widths are multiples of the kernels' block sizes."""
    return not (config.dim % PANEL or config.dim // config.n_head % LANES or config.ffn_dim % LANES)


_PACKED: WeightCache[nn.Module] = WeightCache(_packed)
