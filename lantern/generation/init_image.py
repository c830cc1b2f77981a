"""Images that keep a part of another: its first rows, or what a mask does not cover, as tokens of the VQ encoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from lantern.core.config import as_number, check_number, one_line
from lantern.core.weights import outside_modes
from lantern.generation.images import READ_FORMATS, in_8_bits, read_image
from lantern.generation.requests import Request, check_init_image
from lantern.models.llamagen.vqvae import to_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern.models.folder import Model

MASKED = 128  # grey level from which a mask's pixel is to be generated
OPAQUE = 128  # alpha from which a pixel of an edit is kept
UPLOAD_FORMATS = ("PNG", "WEBP", "JPEG")  # of an image that comes from another machine
UPLOAD_SIDE = 2048  # most pixels of a side of it


@dataclass(frozen=True, eq=False)
class KeptPart:
    """What images keep of another: its pixels in the model's raw size, and which tokens are kept."""

    model: "Model"
    pixels: UInt8[Tensor, "h w 3"]
    is_kept: Bool[Tensor, "rows columns"]

    @cached_property
    @outside_modes
    def tokens(self) -> Int[Tensor, " n"]:
        """The tokens of the VQ encoder, -1 where tokens are generated; the first access runs the encoder."""
        assert self.model.vq is not None
        with torch.inference_mode():
            pixels = to_pixels(self.pixels.permute(2, 0, 1)[None].to(self.model.device))
            tokens = self.model.vq.encode(pixels)[0].cpu()
        return tokens.where(self.is_kept.flatten(), -1)


def with_init_image(
    model: "Model",
    requested: Sequence[Request],
    *,
    init_image: "str | Path | Image | None" = None,
    keep_rows: int | None = None,
    mask_image: "str | Path | Image | None" = None,
) -> list[Request]:
    """Return the requests with the tokens that their images keep of `init_image`, a file or a PIL image.

    `keep_rows` keeps the first rows of tokens. `mask_image`, as large as the image, is white where tokens are
    generated: a token is kept if all its pixels are darker than MASKED. Tokens are made in raster order: a generated
    token depends on kept tokens before it, not on those behind it. What is kept are tokens, that is the VQ
    reconstruction of the image. Without one the requests stay as they are. ValueError for a model without a VQ encoder,
    an image of another size than the model's images, and for rows or a mask that do not fit.
    """
    check_init_image(init_image, keep_rows, mask_image)
    if init_image is None:
        return list(requested)
    size, raster = _size(model), model.target.config.raster
    pixels = _read(init_image, "RGB", size, "init image")
    if mask_image is not None:
        is_kept = _whole_tokens(model, _read(mask_image, "L", size, "mask") < MASKED)
        if bool(is_kept.all()):
            raise ValueError("the mask has no white pixel, wanted white where tokens are generated")
    else:
        keep_rows = as_number(keep_rows)
        check_number("number of rows to keep", keep_rows, 1, raster.rows - 1, kind=int)
        is_kept = torch.zeros(raster.rows, raster.columns, dtype=torch.bool)
        is_kept[:keep_rows] = True
    forced = KeptPart(model, pixels, is_kept).tokens
    return [replace(request, forced=forced) for request in requested]


def received(model: "Model", file: bytes, name: str) -> "Image":
    """Return an image with alpha from the bytes of a PNG, WebP or JPEG file.

    It has the model's raw size or a whole multiple of it, up to UPLOAD_SIDE: ValueError for others, for what is no
    such file, and for what `read_image` refuses. `name` is what messages say.
    """
    width, height = _size(model)
    try:
        found = read_image(file, UPLOAD_FORMATS, most_side=UPLOAD_SIDE).convert("RGBA")
    except Exception as error:  # Pillow raises of every kind for damaged files
        raise ValueError(f"cannot read the {name}: {one_line(error)}") from error
    scale = max(found.width // width, 1)
    if found.size != (width * scale, height * scale):
        got, wanted = f"{found.width}x{found.height}", f"{width}x{height} or a whole multiple"
        raise ValueError(f"the {name} has {got} pixels, wanted {wanted}")
    return found


def edited(model: "Model", image: "Image", mask: "Image | None" = None) -> KeptPart:
    """Return what an edit keeps of a received image: a token is generated if one of its pixels is transparent.

    Transparent pixels are those of the mask, without one those of the image. ValueError if there are none.
    """
    cover = image if mask is None else mask
    is_kept = _whole_tokens(model, torch.from_numpy(np.array(cover.getchannel("A"))) >= OPAQUE)
    if bool(is_kept.all()):
        name, instead = ("image", ", or a mask") if mask is None else ("mask", "")
        raise ValueError(f"the {name} has no transparent pixel, wanted some where it is to be made anew{instead}")
    pixels = image.convert("RGB").reduce(image.width // _size(model)[0])
    return KeptPart(model, torch.from_numpy(np.array(pixels)), is_kept)


def _size(model: "Model") -> tuple[int, int]:
    """Return the width and height of the model's images in pixels; ValueError without a VQ encoder."""
    if model.vq is None:
        raise ValueError(f"model {model.name} has no VQ encoder, which an init image needs{model.missing('vqvae')}")
    height, width = model.size
    return width, height


def _whole_tokens(model: "Model", is_kept: Bool[Tensor, "h w"]) -> Bool[Tensor, "rows columns"]:
    """Return the tokens of which all pixels are kept, in an image of any scale."""
    raster = model.target.config.raster
    return is_kept.unflatten(0, (raster.rows, -1)).unflatten(2, (raster.columns, -1)).all(3).all(1)


def _read(source: "str | Path | Image", mode: str, size: tuple[int, int], name: str) -> UInt8[Tensor, "*n"]:
    """Return the pixels of an image (h w 3), or of a mask (h w); ValueError for another size (width, height)."""
    from PIL import Image

    image = source
    if isinstance(source, str | Path):
        try:
            image = read_image(Path(source).read_bytes(), (*READ_FORMATS, "TIFF"))
        except Exception as error:  # Pillow raises of every kind for damaged files
            raise ValueError(f"cannot read the {name} {source}: {one_line(error)}") from error
    if not isinstance(image, Image.Image):
        raise TypeError(f"the {name} is of type {type(image).__name__}, wanted a file or a PIL image")
    if image.size != size:
        of = f" {source}" if isinstance(source, str | Path) else ""
        got, wanted = ("x".join(map(str, sides)) for sides in (image.size, size))
        raise ValueError(f"the {name}{of} has {got} pixels, wanted {wanted}, the model's raw size (--scale 1)")
    return torch.from_numpy(np.array(in_8_bits(image).convert(mode)))
