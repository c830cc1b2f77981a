"""Contact sheets: pictures in rows, with words under each."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import UInt8
from torch import Tensor

from lantern.io import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

GAP = 8
LINE = 12
LETTER = 6  # mean width of a letter in pixels


def labelled_sheet(
    pictures: UInt8[Tensor, "n 3 h w"], labels: Sequence[str], *, columns: int, scale: int = 2, lines: int = 2
) -> "Image":
    """Pictures `scale` times as large, each above its label in at most `lines` lines."""
    from PIL import Image, ImageDraw, ImageFont

    side = pictures.shape[-1] * scale
    rows = -(-len(pictures) // columns)
    width, height = side + GAP, side + GAP + lines * LINE
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = GAP + (i % columns) * width, GAP + (i // columns) * height
        image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        sheet.paste(image.resize((side, side), Image.Resampling.NEAREST), (left, top))
        for row, line in enumerate(wrap(label, side // LETTER, lines)):
            draw.text((left, top + side + 1 + row * LINE), line, fill="black", font=font)
    return sheet


def wrap(label: str, width: int, lines: int) -> list[str]:
    """At most `lines` lines of about `width` letters; what does not fit ends in dots."""
    return textwrap.wrap(label, max(width, 8), max_lines=lines, placeholder=" ...") if label else []


def save_sheet(sheet: "Image", path: Path) -> int:
    """Writes a sheet as PNG and returns its bytes."""
    with atomic_write(path) as temporary:
        sheet.save(temporary, format="PNG", optimize=True)
    return path.stat().st_size
