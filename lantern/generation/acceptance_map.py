"""Acceptance maps: for each cell of an image, the length of its run, and whether its token was relaxed.

A run is the tokens that one pass of the target committed: accepted drafts and the token that follows them.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO

from jaxtyping import UInt8
from torch import Tensor

from lantern.core.types import Step
from lantern.generation.images import to_image

RELAXED = 0.5  # a cell is marked if the probability that only the relaxation accepted its token is at least this
CELL = 10  # SVG units per cell
WEBP_QUALITY = 90
URI = "data:image/webp;base64,"


@dataclass(frozen=True)
class Shade:
    """Colour and legend text of runs of `least` or more tokens."""

    least: int
    colour: str
    opacity: float
    words: str


# Okabe and Ito's palette, from light to dark: the order is visible without distinguishing hues
SHADES = (
    Shade(1, "#ffffff", 0.0, "one token in its pass"),
    Shade(2, "#f0e442", 0.60, "run of 2 or 3 tokens"),
    Shade(4, "#56b4e9", 0.65, "run of 4 to 7 tokens"),
    Shade(8, "#0072b2", 0.75, "run of 8 or more tokens"),
)
MARK = "#d55e00"
MARK_WORDS = "dot: relaxed, accepted only because of the relaxation"


@dataclass(frozen=True)
class AcceptanceMap:
    """The map of one image: `runs` are the tokens of each pass in raster order, `relaxed` (cell, probability) pairs."""

    runs: tuple[int, ...]
    relaxed: tuple[tuple[int, float], ...]
    columns: int

    @property
    def cells(self) -> int:
        """Number of tokens of the image."""
        return sum(self.runs)

    @property
    def marked(self) -> list[int]:
        """Cells that count as relaxed."""
        return [cell for cell, chance in self.relaxed if chance >= RELAXED]


def read_map(steps: Sequence[Step], image: int, tokens: int, columns: int) -> AcceptanceMap:
    """Return the map of one image of a generation with `keep_history=True`, of `columns` cells in a row.

        start 5, counts 3, verdict of length 2:     cells 5 and 6 are accepted drafts, 7 is the target's own token

    ValueError if the steps do not add up to the `tokens` tokens of one image.
    """
    runs: list[int] = []
    relaxed: list[tuple[int, float]] = []
    for step in steps:
        count = int(step.counts[image])
        if count == 0:  # finished before other pictures of the batch
            continue
        start = int(step.start[image])
        if start != sum(runs):
            raise ValueError(f"a step begins at token {start}, expected {sum(runs)}: give all steps of one generation")
        runs.append(count)
        if step.verdict is None or step.verdict.cost is None:
            continue
        drafts = min(count, int(step.verdict.length[image]))
        chances = step.verdict.cost.relaxed[image, :drafts].float().cpu()
        relaxed += [(start + j, round(float(p), 3)) for j, p in enumerate(chances) if p > 0]
    if sum(runs) != tokens:
        raise ValueError(
            f"steps make {sum(runs)} of {tokens} tokens: generate with keep_history=True and give all steps"
        )
    return AcceptanceMap(tuple(runs), tuple(relaxed), columns)


def shade_of(run: int) -> Shade:
    """Return the shade of a run."""
    return [shade for shade in SHADES if shade.least <= run][-1]


def draw_map(found: AcceptanceMap, picture: str, *, title: str) -> str:
    """Return the map over its image as an SVG element; `picture` is the URI of an image."""
    rows = found.cells // found.columns
    width, height = found.columns * CELL, rows * CELL
    runs = [run for run in found.runs for _ in range(run)]  # of each cell
    parts = [
        f'<svg class="map" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<image href="{escape(picture)}" width="{width}" height="{height}" preserveAspectRatio="none"/>',
    ]
    for shade in SHADES[1:]:
        cells = [cell for cell, run in enumerate(runs) if shade_of(run) is shade]
        if cells:
            path = outline(cells, found.columns)
            parts.append(f'<path d="{path}" fill="{shade.colour}" fill-opacity="{shade.opacity}"/>')
    if found.marked:
        dots = "".join(dot(cell, found.columns) for cell in found.marked)
        parts.append(f'<path d="{dots}" fill="{MARK}" stroke="#fff" stroke-width=".8"/>')
    return "".join([*parts, "</svg>"])


def outline(cells: Iterable[int], columns: int) -> str:
    """Return an SVG path around cells in raster order; neighbours in a row become one rectangle."""
    stretches: list[list[int]] = []
    for cell in cells:
        if stretches and cell == stretches[-1][1] + 1 and cell % columns:
            stretches[-1][1] = cell
        else:
            stretches.append([cell, cell])
    return "".join(
        f"M{a % columns * CELL} {a // columns * CELL}h{(b - a + 1) * CELL}v{CELL}h{(a - b - 1) * CELL}z"
        for a, b in stretches
    )


def dot(cell: int, columns: int) -> str:
    """Return a circle in the middle of a cell as an SVG path."""
    radius = CELL * 0.28
    left, middle = cell % columns * CELL + CELL / 2 - radius, cell // columns * CELL + CELL / 2
    arc = f"a{radius:g} {radius:g} 0 1 0 "
    return f"M{left:g} {middle:g}{arc}{2 * radius:g} 0{arc}{-2 * radius:g} 0z"


def legend() -> str:
    """Return the legend of shades and marks as HTML."""
    items = [
        f'<li><span class="swatch" style="background:{shade.colour};opacity:{max(shade.opacity, 0.15):g}"></span>'
        f"{escape(shade.words)}</li>"
        for shade in SHADES
    ]
    items.append(f'<li><span class="swatch round" style="background:{MARK}"></span>{escape(MARK_WORDS)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def data_uri(pixels: UInt8[Tensor, "h w 3"], *, effort: int = 6) -> str:
    """Return an image as the data URI of a WebP file; `effort` from 0 (fast) to 6 (small) is that of the encoder."""
    kept = BytesIO()
    to_image(pixels).save(kept, format="WEBP", quality=WEBP_QUALITY, method=effort)
    return URI + base64.b64encode(kept.getvalue()).decode("ascii")
