"""Pictures composed of pictures: centred on white, recoloured, several of one thing, two things side by side.

Everything is a pure function of its arguments. Pictures are RGBA with straight alpha, `h w 4`; finished ones are RGB on
white. Pillow scales RGBA with premultiplied colours, so that edges stay clean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

Rgba = UInt8[np.ndarray, "h w 4"]
Rgb = UInt8[np.ndarray, "h w 3"]

# Hue in degrees, saturation and value of a typical object of that colour.
TARGETS: dict[str, tuple[float, float, float]] = {
    "red": (0, 0.85, 0.88),
    "orange": (28, 0.88, 0.98),
    "yellow": (50, 0.80, 0.99),
    "green": (125, 0.70, 0.70),
    "blue": (215, 0.80, 0.88),
    "purple": (275, 0.62, 0.75),
    "pink": (330, 0.42, 0.98),
    "black": (240, 0.06, 0.20),
}
# Upper bounds of the arcs of the hue circle; beyond the last is red again.
ARCS = ((13, "red"), (32, "orange"), (68, "yellow"), (165, "green"), (252, "blue"), (297, "purple"))
BAND = 36.0

# Places of the copies as (left, top, width, height) in 64ths of the picture.
LAYOUTS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    2: ((1, 8, 30, 48), (33, 8, 30, 48)),
    3: ((17, 1, 30, 30), (1, 33, 30, 30), (33, 33, 30, 30)),
    4: ((1, 1, 30, 30), (33, 1, 30, 30), (1, 33, 30, 30), (33, 33, 30, 30)),
}


@dataclass(frozen=True)
class Colouring:
    """The one colour of an object: its name, its median hue (degrees), saturation and value.

    is_vivid: the hue covers most of the object, so that turning it recolours the object.
    """

    name: str
    hue: float
    saturation: float
    value: float
    is_vivid: bool


def on_white(picture: Rgba) -> Rgb:
    """Return the picture on white."""
    alpha = picture[..., 3:].astype(np.float32) / 255
    return np.rint(picture[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def to_hsv(picture: Rgba) -> Float[np.ndarray, "h w 3"]:
    """Return hue in degrees, saturation and value in [0, 1]."""
    rgb = picture[..., :3].astype(np.float32) / 255
    high, low = rgb.max(-1), rgb.min(-1)
    spread = np.maximum(high - low, 1e-6)
    r, g, b = np.moveaxis(rgb, -1, 0)
    sector = np.select([high == r, high == g], [(g - b) / spread, 2 + (b - r) / spread], 4 + (r - g) / spread)
    saturation = (high - low) / np.maximum(high, 1e-6)
    return np.stack([60 * sector % 360, saturation, high], axis=-1).astype(np.float32)


def to_rgb(hsv: Float[np.ndarray, "h w 3"]) -> Rgb:
    """Return the inverse of `to_hsv` as bytes."""
    hue, saturation, value = np.moveaxis(hsv, -1, 0)
    shift = (np.array([5, 3, 1]) + hue[..., None] / 60) % 6
    dip = np.clip(np.minimum(shift, 4 - shift), 0, 1)
    rgb = value[..., None] * (1 - saturation[..., None] * dip)
    return np.rint(255 * np.clip(rgb, 0, 1)).astype(np.uint8)


def hue_distance(hue: Float[np.ndarray, "*n"] | np.floating | float, centre: float) -> Float[np.ndarray, "*n"]:
    """Return the smaller angle between hues in degrees."""
    return np.abs((np.asarray(hue, dtype=np.float32) - centre + 180) % 360 - 180)


def colour_name(hue: float, saturation: float, value: float) -> str:
    """Return the name of a colour."""
    if value < 0.35:
        return "black"
    if 150 <= hue < 300 and saturation < 0.42:
        return "gray"
    if 297 <= hue < 342 or ((hue >= 342 or hue < 13) and saturation < 0.5 and value > 0.75):
        return "pink"
    if 8 <= hue < 36 and (value < 0.80 or saturation < 0.62):
        return "brown"
    if (hue >= 342 or hue < 8) and saturation < 0.68 and value < 0.72:
        return "brown"
    return next((name for bound, name in ARCS if hue < bound), "red")


def find_colour(picture: Rgba) -> Colouring | None:
    """Return the colour of the object if it has a single one, else None.

    If vivid pixels (saturation > 0.3, value > 0.2) make up half of the object and four fifths of them share a hue, that
    is the colour. If less than a tenth are vivid, the object is white, grey or black.
    """
    solid: Bool[np.ndarray, "h w"] = picture[..., 3] > 128
    hsv = to_hsv(picture)[solid]
    vivid = hsv[(hsv[:, 1] > 0.3) & (hsv[:, 2] > 0.2)]
    if len(vivid) < 0.1 * len(hsv):
        value = float(np.median(hsv[:, 2]))
        spread = float(np.quantile(hsv[:, 2], 0.85) - np.quantile(hsv[:, 2], 0.15))
        name = "white" if value > 0.8 else "black" if value < 0.35 else "gray"
        return Colouring(name, 0.0, 0.0, value, False) if spread < 0.35 else None
    counts = np.histogram(vivid[:, 0], bins=36, range=(0, 360))[0]
    smooth = counts + np.roll(counts, 1) + np.roll(counts, -1)
    centre = 10.0 * int(smooth.argmax()) + 5
    near = vivid[hue_distance(vivid[:, 0], centre) < BAND]
    if len(near) < 0.8 * len(vivid) or len(near) < 0.5 * len(hsv):
        return None
    offset = float(np.median((near[:, 0] - centre + 180) % 360 - 180))
    hue, saturation, value = (centre + offset) % 360, *np.median(near[:, 1:], axis=0)
    name = colour_name(hue, float(saturation), float(value))
    # Lightening nearly black pixels shows noise instead of colour.
    return Colouring(name, hue, float(saturation), float(value), bool(value >= 0.35))


def other_colours(colouring: Colouring) -> list[str]:
    """Return the colours of `TARGETS` that differ visibly from the picture's."""
    return [
        name
        for name, (hue, saturation, _) in TARGETS.items()
        if name != colouring.name
        and (name == "black" or hue_distance(colouring.hue, hue) > 20 or abs(colouring.saturation - saturation) > 0.3)
    ]


def recolour(picture: Rgba, colouring: Colouring, colour: str) -> Rgba:
    """Return the picture with its colour changed to one of `TARGETS`; other hues, outlines and shading are kept."""
    hue, saturation, value = TARGETS[colour]
    hsv = to_hsv(picture)
    distance = hue_distance(hsv[..., 0], colouring.hue)
    # The change fades with saturation too: the hue of a grey pixel is noise.
    share = np.clip((BAND + 12 - distance) / 12, 0, 1) * np.clip(hsv[..., 1] / 0.15, 0, 1)
    recoloured = np.empty_like(hsv)
    offset = (hsv[..., 0] - colouring.hue + 180) % 360 - 180
    recoloured[..., 0] = (hue + 0.4 * offset) % 360
    recoloured[..., 1] = np.clip(hsv[..., 1] * min(saturation / colouring.saturation, 2.5), 0, 1)
    if value <= colouring.value:
        recoloured[..., 2] = hsv[..., 2] * value / colouring.value
    else:
        # Towards white if the middle gets lighter, so that highlights are not clipped.
        lifted = 1 - (1 - hsv[..., 2]) * ((1 - value) / max(1 - colouring.value, 0.02))
        recoloured[..., 2] = np.minimum(lifted, hsv[..., 2] * 1.6)
    mixed = share[..., None] * to_rgb(recoloured) + (1 - share[..., None]) * picture[..., :3]
    return np.concatenate([np.rint(mixed).astype(np.uint8), picture[..., 3:]], axis=-1)


def arrange(pictures: Sequence[Rgba], boxes: Sequence[tuple[float, float, float, float]]) -> Rgb:
    """Return the pictures' visible parts on white, each scaled to its box (in 64ths) and centred in it."""
    from PIL import Image

    size = pictures[0].shape[0]
    canvas = Image.new("RGBA", (size, size), (255, 255, 255, 255))
    for picture, (left, top, width, height) in zip(pictures, boxes, strict=True):
        image = Image.fromarray(picture)
        # Nearly transparent rims would make the box larger than the visible part.
        visible = Image.fromarray(np.where(picture[..., 3] > 16, 255, 0).astype(np.uint8))
        image = image.crop(visible.getbbox())
        scale = min(width * size / 64 / image.width, height * size / 64 / image.height)
        shape = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(shape, Image.Resampling.LANCZOS)
        centre = ((left + width / 2) * size / 64, (top + height / 2) * size / 64)
        corner = (round(centre[0] - image.width / 2), round(centre[1] - image.height / 2))
        canvas.alpha_composite(image, corner)
    return np.asarray(canvas.convert("RGB"))


def copies(picture: Rgba, number: int) -> Rgb:
    """Return `number` (2 to 4) copies of the picture, laid out on white."""
    return arrange([picture] * number, LAYOUTS[number])


def shifted(picture: Rgba, rng: np.random.Generator) -> Rgb:
    """Return the picture at 80 to 95 % of its full size at a random place on white."""
    side = rng.uniform(0.80, 0.95) * 62
    left, top = rng.uniform(1, 63 - side, size=2)
    return arrange([picture], [(left, top, side, side)])
