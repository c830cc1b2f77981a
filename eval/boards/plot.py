"""`python -m lantern.eval.boards.plot FILE.jsonl`: draws a board.

Left: tokens per step and speedup of every method. Right: tokens per step against total variation, one curve per rule.
Equal lines give equal bytes.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, arg, command, existing, opt, run_command
from lantern.core.io import atomic_write
from lantern.eval.boards.table import figures_of, reach

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, each with a mark of its own, so that families differ without colour
LOOKS = (
    *(("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#56b4e9", "v")),
    *(("#d55e00", "P"), ("#8a8000", "X"), ("#555555", "p"), ("#000000", "h")),
)
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "lantern", "svg.fonttype": "none", "font.size": 8.0}
Row = Mapping[str, Any]
LINE, MARGIN, WIDTH, LEAST_HEIGHT = 0.19, 1.3, 11.0, 4.0  # inches


def plot(
    file: Path = arg("lines that `lantern leaderboard` wrote", type=existing),
    out: Path | None = opt(None, "image to write: .png, .svg or .pdf (default FILE.png)", metavar="PATH"),
) -> int:
    """Draw the methods of a leaderboard, and print the path of the image."""
    path = out or file.with_suffix(".png")
    save(figures_of(file), path)
    print(path)
    return DONE


def save(found: Mapping[str, Any], path: Path) -> None:
    """Draw the methods that were measured, at the first temperature, into a file without time and program names."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    measured = [row for row in found["boards"][0]["rows"] if "reason" not in row]
    rows = sorted(measured, key=lambda row: row["tokens_per_step"]["value"])
    facts: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
    with rc_context(SETTINGS), atomic_write(path) as temporary:
        figure = Figure(figsize=(WIDTH, max(LINE * len(rows) + MARGIN, LEAST_HEIGHT)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        draw_ranks(left, rows)
        draw_costs(right, rows)
        figure.suptitle(f"{found['model']}, {found['variant']}; bars: 95 % intervals", fontsize=9)
        figure.savefig(temporary, dpi=110, metadata=facts.get(path.suffix))


def draw_ranks(panel: "Axes", rows: Sequence[Row]) -> None:
    """Draw one line per method: tokens per step, and speedup over plain decoding in the same engine."""
    for place, row in enumerate(rows):
        speed = row["speedup"]
        low, high = speed["interval_95"]
        line = {"value": place, "low": None}
        point(panel, LOOKS[0], row["tokens_per_step"], line)
        face = LOOKS[1][0] if speed["claim"] is not None else "#ffffff"
        point(panel, LOOKS[1], {"value": speed["median_of_ratios"], "low": low, "high": high}, line, face=face)
    for label, (colour, mark) in (("tokens per step", LOOKS[0]), ("speedup (hollow: no claim)", LOOKS[1])):
        panel.plot([], [], mark, color=colour, label=label)
    panel.axvline(1.0, color="#000000", linewidth=0.6, linestyle=":")
    panel.set_yticks(range(len(rows)), [row["method"] for row in rows])
    panel.legend(loc="lower right", fontsize=7)
    panel.grid(axis="x", color="#dddddd", linewidth=0.5)


def draw_costs(panel: "Axes", rows: Sequence[Row]) -> None:
    """Draw tokens per step against total variation, settings of one method joined by a line."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["method"].partition(":")[0], []).append(row)
    for look, (name, members) in zip(cycle(LOOKS), families.items(), strict=False):
        members.sort(key=lambda row: row["total_variation"]["value"])
        ends = [(row["total_variation"]["value"], row["tokens_per_step"]["value"]) for row in members]
        panel.plot(*zip(*ends, strict=True), color=look[0], linewidth=0.8)
        for row in members:
            point(panel, look, row["total_variation"], row["tokens_per_step"])
        panel.annotate(name, ends[-1], xytext=(5, 3), textcoords="offset points", fontsize=7)
    panel.set_xlabel("total variation per token")
    panel.set_ylabel("tokens per step")
    panel.margins(0.15)
    panel.grid(color="#dddddd", linewidth=0.5)


def point(panel: "Axes", look: tuple[str, str], x: Row, y: Row, *, face: str = "") -> None:
    """Draw a point with its intervals, filled with `face`, by default its colour."""
    colour, mark = look
    bars = [None if one["low"] is None else [[part] for part in reach(one)] for one in (x, y)]
    how: dict[str, Any] = {"fmt": mark, "color": colour, "markerfacecolor": face or colour, "markersize": 5}
    panel.errorbar(x["value"], y["value"], bars[1], bars[0], elinewidth=0.7, capsize=1.5, **how)


main = partial(run_command, command(plot), prog="python -m lantern.eval.boards.plot")

if __name__ == "__main__":
    sys.exit(main())
