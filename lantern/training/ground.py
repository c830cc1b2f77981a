"""Bare ground under one code.

The tokenizer's norms and attention see the whole picture, so its codes for bare white differ from picture to picture:
six nats of noise a code on a third of all codes. A target learns to know a training picture by that noise and then
ignores the caption. Giving bare patches the one code that they most often have takes it away.
"""

import torch.nn.functional as F
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

WHITE = 250  # darkest byte that counts as bare
MARGIN = 1  # pixels around a patch that must be bare too


def bare_patches(pictures: UInt8[Tensor, "b 3 h w"], patch: int) -> Bool[Tensor, "b n"]:
    """Which patches, in raster order, are white up to their margin."""
    ink = (pictures.amin(1, keepdim=True) < WHITE).float()
    seen = F.max_pool2d(F.pad(ink, (MARGIN,) * 4), patch + 2 * MARGIN, patch)
    return (seen == 0).flatten(1)


def ground_code(codes: Int[Tensor, "b n"], bare: Bool[Tensor, "b n"]) -> int:
    """The code that bare patches most often have; ValueError where no patch is bare."""
    if not bool(bare.any()):
        raise ValueError("no picture has bare white ground: leave settle_ground out of the config")
    return int(codes[bare].long().bincount().argmax())


def settle_ground(codes: Int[Tensor, "b n"], pictures: UInt8[Tensor, "b 3 h w"], patch: int) -> Int[Tensor, "b n"]:
    """The codes of pictures with all bare patches under one code, the one that is most frequent there."""
    bare = bare_patches(pictures, patch)
    return codes.masked_fill(bare, ground_code(codes, bare))
