"""Memorisation: distances of generated images to their nearest training images."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

COPY_RATIO = 1.5  # a copy is nearer than this multiple of the tokenizer's own error
SAME_CODES = 0.9


@dataclass(frozen=True)
class Nearest:
    """Index of each image's nearest training image, and the root-mean-square difference of their bytes."""

    index: Int[Tensor, " b"]
    rmse: Float[Tensor, " b"]


def nearest_pixels(
    pictures: UInt8[Tensor, "b 3 h w"], training: UInt8[Tensor, "n 3 h w"], *, block: int = 1024
) -> Nearest:
    """Find the nearest training image of each image by squared distance of bytes."""
    queries = pictures.flatten(1).double()
    best = torch.full((len(queries),), torch.inf, dtype=torch.float64)
    index = torch.zeros(len(queries), dtype=torch.long)
    for first in range(0, len(training), block):
        part = training[first : first + block].flatten(1).double()
        # exact in float64, since squared norms of 64 x 64 x 3 bytes are below 2 ** 53
        distance = queries.square().sum(1)[:, None] + part.square().sum(1) - 2 * queries @ part.T
        value, place = distance.min(1)
        index = torch.where(value < best, place + first, index)
        best = torch.minimum(value, best)
    return Nearest(index, (best / queries.shape[1]).clamp(min=0).sqrt().float())


def share(values: Tensor) -> float:
    """Return the mean, or the share of true values, rounded to four places."""
    return round(float(values.double().mean()), 4)


def report(ratio: Float[Tensor, " b"], same_codes: Float[Tensor, " b"]) -> dict[str, object]:
    """Summarise distances: `ratio` to the tokenizer's own error, and `same_codes`, the share of equal codes."""
    cuts = torch.quantile(ratio.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    return {
        "n": len(ratio),
        "copies": share(ratio < COPY_RATIO),
        "ratio_quantiles": {f"{q}%": round(float(cut), 3) for q, cut in zip((10, 50, 90), cuts, strict=True)},
        "same_codes_mean": share(same_codes),
        "same_codes_copies": share(same_codes >= SAME_CODES),
    }
