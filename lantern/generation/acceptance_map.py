"""Acceptance maps: an image under the lengths of its runs, with a dot on each relaxed token.

A run is the tokens that one pass of the target committed: accepted drafts and the token that follows them.
"""

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

CELL = 10  # SVG units per token


class Shade(NamedTuple):
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


def draw_map(runs: Sequence[int], relaxed: Collection[int], columns: int, picture: str, *, title: str) -> str:
    """Return the map over its image as an SVG element; `picture` is the URI of the image.

    `runs` are the numbers of tokens of all passes in order, `relaxed` the places of relaxed tokens in raster order.
    """
    cells, dots = {shade: "" for shade in SHADES}, ""
    for place, run in enumerate(length for length in runs for _ in range(length)):
        left, top = place % columns * CELL, place // columns * CELL
        shade = [shade for shade in SHADES if shade.least <= run][-1]
        cells[shade] += f"M{left} {top}h{CELL}v{CELL}h-{CELL}z"
        if place in relaxed:
            dots += f'<circle cx="{left + CELL / 2:g}" cy="{top + CELL / 2:g}" r="{CELL * 0.28:g}"/>'
    width, height = columns * CELL, sum(runs) // columns * CELL
    shades = [
        f'<path d="{path}" fill="{shade.colour}" fill-opacity="{shade.opacity}"/>'
        for shade, path in cells.items()
        if path and shade.opacity
    ]
    return (
        f'<svg class="map" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
        f'<image href="{escape(picture)}" width="{width}" height="{height}" preserveAspectRatio="none"/>'
        f'{"".join(shades)}<g fill="{MARK}" stroke="#fff" stroke-width=".8">{dots}</g></svg>'
    )


def legend() -> str:
    """Return the legend of shades and marks as HTML."""
    items = [
        f'<li><span class="swatch" style="background:{shade.colour};opacity:{max(shade.opacity, 0.15):g}"></span>'
        f"{escape(shade.words)}</li>"
        for shade in SHADES
    ]
    items.append(f'<li><span class="swatch round" style="background:{MARK}"></span>{escape(MARK_WORDS)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'
