"""Draws by Gumbel noise as an operation of torch, which its compiler leaves as it is (`draws.h`), and that noise."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.kernels.build import library
from lantern.kernels.packed import LANES, DrawsTold
from lantern.noise import Purpose, purpose_key
from lantern.sampling import Sampling

_OPERATIONS = torch.library.Library("lantern", "FRAGMENT")
_OPERATIONS.define(
    "draw(Tensor logits, Tensor places, Tensor? noise, float guidance, float temperature, int top_k, int interval,"
    " int width) -> Tensor"
)


def draws(sampling: Sampling, noise: Any) -> Callable[..., Tensor] | None:
    """As `decoding.draws.quick_draws`; None for a law with top-p, and for noise of which there are no tables."""
    if sampling.top_p < 1 or not hasattr(noise, "gumbel_table"):
        return None
    last = 1 << 30  # interval and top-k are numbers of 32 bits
    settings = (float(sampling.guidance), float(sampling.temperature))
    counts = (min(sampling.top_k, last), min(sampling.guidance_interval, last))

    def best(
        logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"], *, width: int = 1, purpose: int = Purpose.TARGET
    ) -> Int[Tensor, "b n k"]:
        return torch.ops.lantern.draw(logits, places, noise.gumbel_table(purpose), *settings, *counts, width)

    return best


def fused_uniforms(
    seeds: Int[Tensor, " b"], images: Int[Tensor, " b"], purpose: Purpose, positions: Int[Tensor, " n"], count: int
) -> Float64[Tensor, "b n count"]:
    """As `noise.random_uniforms`, number for number."""
    key, out = purpose_key(seeds, purpose), torch.empty(len(seeds), len(positions), count, dtype=torch.float64)
    given = [tensor.contiguous() for tensor in (key.low, key.high, images, positions)]
    sizes = (len(seeds), len(positions), count, torch.get_num_threads())
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, out))
    library().lantern_uniforms(*map(ctypes.c_int32, sizes), *places)
    return out


def _draw(
    logits: Tensor,
    places: Tensor,
    noise: Tensor | None,
    guidance: float,
    temperature: float,
    top_k: int,
    interval: int,
    width: int,
) -> Tensor:
    images, rows, nodes, vocab = logits.shape
    logits, places = logits.float().contiguous(), places.contiguous()
    assert vocab % LANES == 0, "draws take codes sixteen at a time, as fused passes do"
    codes = 0
    if noise is not None:
        assert noise.is_contiguous() and noise.shape[::2] == (images, vocab), "noise of other pictures or codes"
        codes = noise.shape[1]
        places = places.clamp(0, codes - 1)
    drawn = places.new_empty(images, nodes, width)
    sizes = (images, rows, nodes, vocab, codes, top_k, interval, width, torch.get_num_threads())
    tensors = (logits, places, noise, drawn)
    told = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    library().lantern_draw(ctypes.byref(DrawsTold(*sizes, guidance, temperature, *told)))
    return drawn


_OPERATIONS.impl("draw", _draw, "CPU")


@torch.library.register_fake("lantern::draw")
def _(logits: Tensor, places: Tensor, noise: Any, guidance: Any, temperature: Any, *settings: Any) -> Tensor:
    return places.new_empty(*places.shape, settings[-1])
