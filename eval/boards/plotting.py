"""What plots share: colours and marks, error bars, and files whose bytes depend on the figures only."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.core.io import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, each with a mark of its own, so that families differ without colour
LOOKS = (
    ("#0072b2", "o"),
    ("#e69f00", "s"),
    ("#009e73", "^"),
    ("#cc79a7", "D"),
    ("#56b4e9", "v"),
    ("#d55e00", "P"),
    ("#8a8000", "X"),
    ("#555555", "p"),
    ("#000000", "h"),
)
DPI = 110
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "lantern",
    "svg.fonttype": "none",
    "font.size": 8.0,
    "axes.unicode_minus": True,
}


def save_figure(draw: "Callable[[], Figure]", stem: Path, *, mark: str) -> list[Path]:
    """Write the figure that `draw` returns as `stem`.png and `stem`.svg, without time and program names.

    `mark` names the figures that it shows (`results.figures_mark`); both files hold it.
    """
    # it warns in two lines where its cache folder cannot be written, and needs none
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib import rc_context

    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    facts: list[dict[str, Any]] = [{"Software": None, "Source": mark}, {"Date": None, "Creator": None, "Source": mark}]
    with rc_context(SETTINGS):
        figure = draw()
        for path, metadata in zip(paths, facts, strict=True):
            with atomic_write(path) as temporary:
                figure.savefig(temporary, dpi=DPI, metadata=metadata)
    return paths


def reach(estimate: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lengths of an interval below and above its value; 0 without an interval."""
    if estimate["low"] is None:
        return (0.0, 0.0)
    return max(estimate["value"] - estimate["low"], 0.0), max(estimate["high"] - estimate["value"], 0.0)


def draw_point(
    panel: "Axes",
    at: tuple[float, float],
    look: tuple[str, str],
    *,
    is_claimed: bool,
    xerr: tuple[float, float],
    yerr: tuple[float, float] | None = None,
    size: float = 5,
    **more: Any,
) -> None:
    """Draw a point with its intervals in a colour with a mark; hollow if no claim is made."""
    colour, shape = look
    panel.errorbar(
        *([value] for value in at),
        xerr=[[end] for end in xerr],
        yerr=None if yerr is None else [[end] for end in yerr],
        fmt=shape,
        markersize=size,
        markerfacecolor=colour if is_claimed else "#ffffff",
        markeredgecolor=colour,
        ecolor=colour,
        elinewidth=0.7,
        capsize=1.5,
        zorder=3,
        **more,
    )
