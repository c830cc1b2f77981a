"""Contact sheets: many pictures in one PNG."""

from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from lantern.io import atomic_write


def grid_of(pictures: UInt8[Tensor, "n 3 h w"], *, columns: int, gap: int = 2) -> UInt8[Tensor, "hh ww 3"]:
    """Lays pictures out in rows of `columns` on white, `gap` pixels apart."""
    n, _, height, width = pictures.shape
    rows = -(-n // columns)
    sheet = torch.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, dtype=torch.uint8)
    for i, picture in enumerate(pictures):
        top, left = gap + (i // columns) * (height + gap), gap + (i % columns) * (width + gap)
        sheet[top : top + height, left : left + width] = picture.permute(1, 2, 0)
    return sheet


def save_grid(pictures: UInt8[Tensor, "n 3 h w"], path: Path, *, columns: int) -> None:
    """Writes a contact sheet as PNG, at once or not at all."""
    from PIL import Image

    with atomic_write(path) as temporary:
        Image.fromarray(grid_of(pictures.cpu(), columns=columns).numpy()).save(temporary, format="PNG")
