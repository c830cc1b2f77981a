"""The resize of a protocol, which both sets of images pass before each network's own."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from lantern.eval.metrics.pictures import raw

Resize = Callable[[np.ndarray], np.ndarray]


def resizing(name: str, size: int) -> Resize | None:
    """Return the resize of a protocol, which maps images (uint8, h w 3) to squares of `size` pixels.

    "none" is None: no resize before the network's own. "crop-lanczos" crops the central square and resizes it with
    Pillow's Lanczos filter, as in the evaluations of GigaGAN, LlamaGen and LANTERN. "bicubic" is PyTorch's without
    antialiasing, as in LlamaGen's evaluation of classes. An image of the right size is returned unchanged. "bicubic"
    raises ValueError for an image that is not square.
    """
    return None if name == "none" else partial({"crop-lanczos": crop_lanczos, "bicubic": bicubic}[name], size=size)


def crop_lanczos(pixels: np.ndarray, *, size: int) -> np.ndarray:
    """Crop the central square and resize it with Pillow's Lanczos filter."""
    from PIL import Image

    height, width = pixels.shape[:2]
    side = min(height, width)
    # as in torchvision's centre crop, round half to even
    top, left = round((height - side) / 2), round((width - side) / 2)
    square = pixels[top : top + side, left : left + side]
    if side == size:
        return square
    return np.asarray(Image.fromarray(square).resize((size, size), Image.Resampling.LANCZOS))


def bicubic(pixels: np.ndarray, *, size: int) -> np.ndarray:
    """Resize with PyTorch's bicubic without antialiasing; values are truncated to bytes as in LlamaGen.

    ValueError for an image that is not square.
    """
    if pixels.shape[0] != pixels.shape[1]:
        raise ValueError(f"an image is {pixels.shape[1]} x {pixels.shape[0]}, expected a square one")
    if pixels.shape[0] == size:
        return pixels
    found = torch.nn.functional.interpolate(
        raw(pixels)[None].float(), (size, size), mode="bicubic", align_corners=False
    )
    return found[0].clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
