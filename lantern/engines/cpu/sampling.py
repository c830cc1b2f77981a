"""Sampling by Gumbel noise and the noise's uniforms in C++ (`sampling.h`), as operations of torch.

torch.compile leaves the operations as they are.
"""

import ctypes
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.noise import Purpose, purpose_key
from lantern.core.sampling import Sampling
from lantern.core.types import Sampler
from lantern.engines.cpu.build import library
from lantern.engines.cpu.packed import LANES, SampleArgs

_OPERATIONS = torch.library.Library("lantern", "FRAGMENT")
_OPERATIONS.define(
    "sample(Tensor logits, Tensor places, Tensor? noise, float guidance, float temperature, int top_k, int interval,"
    " int width) -> Tensor"
)


def sampler_of(sampling: Sampling, noise: Any) -> Sampler | None:
    """Return the sampler of `Target.sampler`, whose codes have the noise of `noise.gumbel_table`; None for top-p."""
    if sampling.top_p < 1:
        return None
    last = 1 << 30  # interval and top-k are 32-bit integers in C++
    settings = (float(sampling.guidance), float(sampling.temperature))
    counts = (min(sampling.top_k, last), min(sampling.guidance_interval, last))

    def best(
        logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"], *, width: int = 1, purpose: int = Purpose.TARGET
    ) -> Int[Tensor, "b n k"]:
        return torch.ops.lantern.sample(logits, places, noise.gumbel_table(purpose), *settings, *counts, width)

    return best


def uniforms(
    seeds: Int[Tensor, " b"], images: Int[Tensor, " b"], purpose: Purpose, positions: Int[Tensor, " n"], count: int
) -> Float64[Tensor, "b n count"]:
    """Return the numbers of `noise.random_uniforms`."""
    key, out = purpose_key(seeds, purpose), torch.empty(len(seeds), len(positions), count, dtype=torch.float64)
    given = [tensor.contiguous() for tensor in (key.low, key.high, images, positions)]
    sizes = (len(seeds), len(positions), count, torch.get_num_threads())
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, out))
    library().lantern_uniforms(*map(ctypes.c_int32, sizes), *places)
    return out


def _sample(
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
    assert vocab % LANES == 0, f"{vocab} codes, expected a multiple of {LANES}"
    codes = 0
    if noise is not None:
        assert noise.is_contiguous() and noise.shape[::2] == (images, vocab), "noise of other images or codes"
        codes = noise.shape[1]
        places = places.clamp(0, codes - 1)
    sampled = places.new_empty(images, nodes, width)
    sizes = (images, rows, nodes, vocab, codes, top_k, interval, width, torch.get_num_threads())
    tensors = (logits, places, noise, sampled)
    arguments = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    library().lantern_sample(ctypes.byref(SampleArgs(*sizes, guidance, temperature, *arguments)))
    return sampled


_OPERATIONS.impl("sample", _sample, "CPU")


@torch.library.register_fake("lantern::sample")
def _(logits: Tensor, places: Tensor, noise: Any, guidance: Any, temperature: Any, *settings: Any) -> Tensor:
    return places.new_empty(*places.shape, settings[-1])
