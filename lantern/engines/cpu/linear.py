"""Linears and single layers of `pass.cpp` as operations of torch, which torch.compile leaves as they are."""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.engines.cpu.build import library
from lantern.engines.cpu.packed import PANEL, LayerArgs, LinearArgs, ModelArgs, PassArgs, arguments, kind_of, size_of

_OPERATIONS = torch.library.Library("lantern", "DEF")
_OPERATIONS.define("linear(Tensor x, Tensor panels, Tensor? bias, int outputs) -> Tensor")
_OPERATIONS.define(
    "layer(Tensor x, Tensor factors, Tensor mask, Tensor(a!) cache, Tensor places, Tensor?[] weights, float eps)"
    " -> Tensor"
)


def linear(
    x: Float[Tensor, "*b k"], panels: Tensor, bias: Float[Tensor, " n"] | None, outputs: int
) -> Float[Tensor, "*b n"]:
    """Return x times a packed weight plus an fp32 bias, in fp32.

    Inputs are rounded to bf16 for a bf16 weight, and to 16-bit integers for an int8 weight.
    """
    return torch.ops.lantern.linear(x, panels, bias, outputs)


def layer(
    x: Float[Tensor, "b n c"],
    factors: Float[Tensor, "b n 3 1 half 2"],
    mask: Float[Tensor, "b n s"],
    cache: Float[Tensor, "2 b h s d"],
    places: Int[Tensor, " n"],
    weights: tuple[Tensor | None, ...],
    eps: float,
) -> Float[Tensor, "b n c"]:
    """Run a decoder layer; its keys and values are written to slots `places` of an fp32 cache. The result is fp32."""
    return torch.ops.lantern.layer(x, factors, mask, cache, places, weights, eps)


def _linear(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    assert panels.shape[0] * PANEL == outputs and panels[0].numel() == size_of(panels, x.shape[-1]), (
        "inputs are not as wide as the weight"
    )
    out, a = x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32), x.float().contiguous()
    sizes = (a[..., 0].numel(), a.shape[-1], outputs, torch.get_num_threads(), kind_of(panels))
    places = (a.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    library().lantern_linear(ctypes.byref(LinearArgs(*sizes, *places)))
    return out


def _layer(
    x: Tensor, factors: Tensor, mask: Tensor, cache: Tensor, places: Tensor, weights: list[Tensor | None], eps: float
) -> Tensor:
    rows, nodes, dim = x.shape
    _, _, heads, slots, _ = cache.shape
    linears = [weight for weight in weights[2:] if weight is not None]
    assert cache.is_contiguous()
    inputs, factors, places = x.float().contiguous(), factors.contiguous(), places.contiguous()
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    # each node has three rotary factors: of query, key and value
    positions = torch.arange(0, 3 * rows * nodes, 3)
    out = torch.empty(rows, nodes, dim)
    only = (LayerArgs * 1)(arguments(tuple(weights)))
    shape = (dim, heads, 1, len(linears[2]) * PANEL // 2, 0, kind_of(*linears))
    model = ModelArgs(*shape, eps, only, None, None, factors.data_ptr())
    run = PassArgs(
        *(rows, nodes, slots, torch.get_num_threads(), 0),
        *(inputs.data_ptr(), positions.data_ptr(), places.data_ptr(), mask.data_ptr()),
        *(mask.stride(0), mask.stride(1), cache.data_ptr(), None, None, out.data_ptr(), None),
    )
    library().lantern_pass(ctypes.byref(model), ctypes.byref(run))
    return out


_OPERATIONS.impl("linear", _linear, "CPU")
_OPERATIONS.impl("layer", _layer, "CPU")


@torch.library.register_fake("lantern::linear")
def _(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32)


@torch.library.register_fake("lantern::layer")
def _(
    x: Tensor, factors: Tensor, mask: Tensor, cache: Tensor, places: Tensor, weights: list[Tensor | None], eps: float
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)
