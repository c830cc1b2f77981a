"""Reports of a frontier, made from frontier.json without a model.

The plot shows speedup and step compression against every axis of quality. The HTML page is one file with plot, table,
images at the same seeds, and acceptance.
"""

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lantern.eval.boards.axes import FEW, GAINS, QUALITY, Axis, interval, shared_axes, staircase
from lantern.eval.boards.leaderboard_report import table, write_text
from lantern.eval.boards.plotting import LOOKS, draw_point, reach, save_figure
from lantern.eval.boards.results import figures_mark
from lantern.generation.acceptance_map import AcceptanceMap, draw_map, legend, mean_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN_LOOK = ("#000000", "*")
PANEL = (4.6, 3.4)  # inches
LEGEND = 2.6


def looks(points: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return colour and mark of each family; plain decoding is always a black star."""
    families = [name for name in dict.fromkeys(point["family"] for point in points) if name != "plain"]
    return {"plain": PLAIN_LOOK} | {name: LOOKS[i % len(LOOKS)] for i, name in enumerate(families)}


def plotted_axes(figures: Mapping[str, Any]) -> list[str]:
    """Return the axes of quality to plot: those of all points; FID only with at least FEW images."""
    return [name for name in shared_axes(figures["points"]) if name != "fid" or figures["images"] >= FEW]


def draw_plot(figures: Mapping[str, Any]) -> "Figure":
    """Draw the plot: a row per axis of quality, a column per gain, and a legend of numbered points."""
    from matplotlib.figure import Figure

    names = plotted_axes(figures)
    width, height = PANEL[0] * len(GAINS) + LEGEND, PANEL[1] * len(names)
    figure = Figure(figsize=(width, height), layout="constrained")
    plots, beside = np.ravel(figure.subfigures(1, 2, width_ratios=[width - LEGEND, LEGEND], squeeze=False))
    grid = plots.subplots(len(names), len(GAINS), squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for panel, gain in zip(row, GAINS, strict=True):
            draw_panel(panel, figures["points"], gain, QUALITY[name])
    draw_legend(beside, figures)
    return figure


def draw_panel(panel: "Axes", points: Sequence[Mapping[str, Any]], gain: Axis, axis: Axis) -> None:
    """Draw one gain against one axis of quality; better is up and left."""
    at = [(point["quality"][axis.name]["value"], point[gain.name]["value"]) for point in points]
    draw_front(panel, at, axis)
    for family, look in looks(points).items():
        numbers = [number for number, point in enumerate(points) if point["family"] == family]
        panel.plot(*zip(*(at[n] for n in numbers), strict=True), color=look[0], linewidth=0.8, alpha=0.5, zorder=2)
        for number in numbers:
            draw_number(panel, points[number], number, gain, axis, look)
    panel.axhline(at[0][1], color="#000000", linewidth=0.6, linestyle=":", zorder=1)
    panel.set_xlabel(axis.label)
    panel.set_ylabel(gain.label)
    if not axis.is_lower_better:
        panel.invert_xaxis()
    panel.locator_params(axis="x", nbins=6)
    panel.ticklabel_format(axis="x", scilimits=(-3, 4))  # KID of some features is below 0.001
    panel.margins(0.12)
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.set_axisbelow(True)


def draw_number(
    panel: "Axes", point: Mapping[str, Any], number: int, gain: Axis, axis: Axis, look: tuple[str, str]
) -> None:
    """Draw a point with intervals and number; hollow if no claim is made."""
    cost, value = point["quality"][axis.name], point[gain.name]
    at = (cost["value"], value["value"])
    draw_point(
        panel,
        at,
        look,
        is_claimed=gain.name != "speedup" or point["refusal"] is None,
        xerr=reach(cost),
        yerr=reach(value),
        size=11 if number == 0 else 6,
        alpha=0.9,
    )
    side, align = (5, "left") if number % 2 else (-5, "right")
    panel.annotate(str(number), at, xytext=(side, 5), textcoords="offset points", ha=align, fontsize=7, zorder=4)


def draw_front(panel: "Axes", points: Sequence[tuple[float, float]], axis: Axis) -> None:
    """Draw the Pareto front of (quality, gain) as a staircase."""
    corners = staircase([axis.cost(quality) for quality, _ in points], [gain for _, gain in points])
    across = [axis.cost(cost) for cost, _ in corners]  # changing the sign twice restores the value
    panel.plot(across, [gain for _, gain in corners], color="#999999", linewidth=2.2, alpha=0.6, zorder=1)


def draw_legend(beside: Any, figures: Mapping[str, Any]) -> None:
    """Draw the legend: numbered points with their marks, and the other lines."""
    from matplotlib.lines import Line2D

    points, look = figures["points"], looks(figures["points"])
    handles = []
    for number, point in enumerate(points):
        colour, shape = look[point["family"]]
        marker: dict[str, Any] = {
            "marker": shape,
            "color": colour,
            "linestyle": "none",
            "markersize": 9 if number == 0 else 6,
        }
        handles.append(Line2D([], [], label=f"{number}  {point['label']}", **marker))
    handles.append(Line2D([], [], color="#999999", linewidth=2.2, alpha=0.6, label="Pareto front"))
    handles.append(Line2D([], [], color="#000000", linewidth=0.6, linestyle=":", label="plain decoding"))
    if any(point["refusal"] for point in points):
        hollow: dict[str, Any] = {"marker": "o", "color": "#555555", "markerfacecolor": "#ffffff", "linestyle": "none"}
        handles.append(Line2D([], [], label="hollow: no claim (too few\npictures or unsteady timing)", **hollow))
    title = f"{figures['images']} images per point\nbars: 95 % bootstrap intervals\nbetter is up and left"
    legend = beside.legend(handles=handles, loc="center left", frameon=False, fontsize=7.5, title=title)
    legend.set_title(title, prop={"size": 7.5})
    legend.get_title().set_multialignment("left")


RULE_PANEL = (3.3, 3.1)  # inches


def draw_curves(figures: Mapping[str, Any]) -> "Figure":
    """Draw one curve per relaxed rule: step compression against every axis of quality, in one row of panels."""
    from matplotlib.figure import Figure

    points, names = figures["points"], plotted_axes(figures)
    look, gain = looks(points), GAINS[1]
    exact = {point["family"] for point in points if point["exact"]}
    figure = Figure(figsize=(RULE_PANEL[0] * len(names), RULE_PANEL[1] + 0.7), layout="constrained")
    grid = np.ravel(figure.subplots(1, len(names), squeeze=False, sharey=True))
    for panel, name in zip(grid, names, strict=True):
        axis = QUALITY[name]
        for family, (colour, shape) in look.items():
            of_family = [point for point in points if point["family"] == family]
            found = [(point["quality"][name]["value"], point[gain.name]["value"]) for point in of_family]
            ends = [reach(point[gain.name]) for point in of_family]
            panel.errorbar(
                [across for across, _ in found],
                [along for _, along in found],
                yerr=np.array(ends).T,
                fmt=shape,
                linestyle="none" if family in exact else "-",
                color=colour,
                markersize=5,
                markerfacecolor="#ffffff" if family in exact else colour,
                linewidth=1.0,
                elinewidth=0.6,
                label=f"{family} (exact)" if family in exact else family,
            )
        panel.set_xlabel(axis.label, fontsize=7.5)
        if not axis.is_lower_better:
            panel.invert_xaxis()
        panel.locator_params(axis="x", nbins=5)
        panel.margins(0.08)
        panel.grid(color="#dddddd", linewidth=0.5)
        panel.set_axisbelow(True)
    grid[0].set_ylabel(gain.label)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=7.5)
    words = f"{figures['images']} images per point; bars: 95 % bootstrap intervals; better is up and left"
    figure.suptitle(words, fontsize=8)
    return figure


def save_plot(figures: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write the plot as `stem`.png and `stem`.svg, of curves for a sweep of rules; equal figures give equal bytes."""
    draw = draw_curves if figures.get("are_rules") else draw_plot
    return save_figure(lambda: draw(figures), stem, mark=figures_mark(figures))


def rules_page(figures: Mapping[str, Any], plot: str) -> str:
    """Return the points of a sweep of rules as a page in Markdown: exact methods first, then each rule.

    `plot` is the path of the plot as the page links it.
    """
    where, sampling = figures["surroundings"], figures["sampling"]
    text = f"""# Relaxed rules

<!-- {figures_mark(figures)} -->

Generated by `lantern frontier`; do not edit. `lantern frontier --rules --from eval/results/rules.json` rewrites it.

Each relaxed rule was measured at three or four strengths on the same tree or window, with the same prompts and seeds as
the exact methods at the top. Brackets hold 95 % bootstrap intervals over images. *TV* is the mean total variation per
code; KID is times 10,000.

![Step compression of each relaxed rule against the measures of the table]({plot})

Model {figures["model"]} ({figures["fingerprint"][:12]}), {figures["variant"]}, {figures["images"]} images per point, \
guidance {sampling["guidance"]:g}, temperature {sampling["temperature"]:g};
torch {where["torch"]}, lantern {where["lantern"]}, commit {where["commit"][:12]}.
"""
    axes = [name for name in shared_axes(figures["points"]) if name != "total-variation"]
    rows = []
    for point in sorted(figures["points"], key=lambda point: (not point["exact"], point["family"])):
        quality = point["quality"]
        spent = f"{quality['total-variation']['value']:.3f}"
        cells = [f"`{point['spec']}`", interval(point["step_compression"], "{:.2f}"), spent]
        for name in axes:
            form, factor = ("{:.1f}", 1e4) if name.startswith("kid") else ("{:.2f}", 1.0)
            cells.append(interval(quality[name], form, factor))
        rows.append(cells)
    header = ("method", "step compression", "TV per code", *(QUALITY[name].label for name in axes))
    return "\n".join([text, *table(header, rows)]) + "\n"


def save_rules(figures: Mapping[str, Any], plot: Path, path: Path) -> Path:
    """Write the page of a sweep of rules beside its plot or elsewhere, and return its path."""
    link = Path(os.path.relpath(plot, path.parent)).as_posix()
    return write_text(path, rules_page(figures, link))


LONG_RUN = 4
MOST_BYTES = 3 << 20
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { font-weight: 600; vertical-align: bottom; } .left { text-align: left; } .scroll { overflow-x: auto; }
.front { font-weight: 700; } .note { color: #555; font-size: .9em; } .interval { color: #555; font-size: .8em; }
.plot { max-width: 100%; height: auto; } .face, .map { width: 112px; height: 112px; vertical-align: top; }
.faces td { text-align: center; } .faces th { max-width: 15rem; }
.bar { display: inline-block; height: .7em; background: #56b4e9; margin-right: .4em; vertical-align: baseline; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; }
.swatch { display: inline-block; width: 1em; height: 1em; border: 1px solid #777; margin-right: .4em;
  vertical-align: -.15em; } .round { border-radius: 50%; }
"""


def render(figures: Mapping[str, Any], plot: bytes) -> str:
    """Return the HTML page; `plot` is the SVG of `save_plot`."""
    image = f"data:image/svg+xml;base64,{base64.b64encode(plot).decode('ascii')}"
    title = f"Speed and quality: {escape(figures['model'])}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style><!-- {figures_mark(figures)} --></head><body>",
        f"<h1>{title}</h1>",
        how(figures),
        f'<h2>Frontier</h2><img class="plot" alt="{escape(in_words(figures))}" src="{image}">',
        f"<p>{escape(in_words(figures))}</p>",
        f"<h2>Points</h2>{points_table(figures)}",
        f"<h2>Images at the same seeds</h2>{pictures_table(figures['points'])}",
        f"<h2>Acceptance by depth</h2>{depths_table(figures['points'])}",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def how(figures: Mapping[str, Any]) -> str:
    """Return the setting of the measurement as a paragraph."""
    where, sampling = figures["surroundings"], figures["sampling"]
    device = where["gpu"] or where["cpu"]
    loads = [load[0] for load in figures["load_average"] if load]
    busy = f" Load average during the rounds: {min(loads):g} to {max(loads):g}." if loads else ""
    return (
        f"<p>{figures['images']} images per point, one at a time, on {escape(str(device))} with "
        f"{where['threads']} CPU threads; torch {escape(where['torch'])}, lantern {escape(where['lantern'])}. "
        f"Methods ran as <b>{escape(figures['variant'])}</b>; the baseline is plain decoding as "
        f"<b>{escape(figures['baseline'].partition(' | ')[2])}</b>, the fastest of {len(figures['plain'])} variants. "
        "All contenders made the same images in interleaved rounds, in one process. Speedup is the ratio of median "
        f"seconds; intervals are 95 % bootstraps over images.{busy} Plain decoding's images were made as "
        f"<b>{escape(figures['points'][0]['drawn_by'].partition(' | ')[2])}</b>. Guidance {sampling['guidance']:g}, "
        f"temperature {sampling['temperature']:g}, top-k {sampling['top_k']}, top-p {sampling['top_p']:g}, "
        f"seed {figures['seed']}.</p>"
    )


def in_words(figures: Mapping[str, Any]) -> str:
    """Return the points on the fronts as text, for the plot's alternative text."""
    found = []
    for gain in GAINS:
        for axis, numbers in figures["fronts"][gain.name].items():
            names = ", ".join(figures["points"][number]["label"] for number in numbers)
            found.append(f"Pareto front of {gain.name.replace('_', ' ')} and {axis.replace('-', ' ')}: {names}.")
    return " ".join(found)


def points_table(figures: Mapping[str, Any]) -> str:
    """Return the table of all points."""
    points = figures["points"]
    axes = [QUALITY[name] for name in shared_axes(points)]
    heads = ["seconds", *(gain.name.replace("_", " ") for gain in GAINS), *(axis.name for axis in axes)]
    heads += ["relaxed codes", "claim"]
    rows = [point_row(number, point, axes, figures["fronts"]) for number, point in enumerate(points)]
    notes = "Bold: on the Pareto front of that gain and total variation."
    if "fid" in shared_axes(points) and figures["images"] < FEW:
        notes += f" FID of fewer than {FEW} images depends mainly on their number; use KID."
    failed = "".join(
        f"<li>{escape(one['method'])} as {escape(one['variant'])}: {escape(one['reason'])}</li>"
        for one in figures["failed"]
    )
    missing = f'<p class="note">Not measured:</p><ul class="note">{failed}</ul>' if failed else ""
    return f'{html_table("point", map(escape, heads), rows)}<p class="note">{notes}</p>{missing}'


def point_row(
    number: int, point: Mapping[str, Any], axes: Sequence[Axis], fronts: Mapping[str, Mapping[str, list[int]]]
) -> str:
    """Return one point as a table row."""
    kind = "exact" if point["exact"] else "relaxed"
    cells = [f'<td class="left">{number}&ensp;{escape(point["label"])} <span class="note">{kind}</span></td>']
    cells.append(f"<td>{point['seconds']['median']:.3f}</td>")
    for gain in GAINS:
        is_on = number in fronts[gain.name].get("total-variation", ())
        cells.append(f"<td{' class=front' if is_on else ''}>{estimate(point[gain.name], gain)}</td>")
    cells += [f"<td>{estimate(point['quality'][axis.name], axis)}</td>" for axis in axes]
    cells.append(f"<td>{100 * point['relaxed_share']:.1f} %</td>")
    claim = "baseline" if number == 0 else point["refusal"] or "claimed"
    cells.append(f'<td class="left note">{escape(claim)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def estimate(found: Mapping[str, Any], axis: Axis) -> str:
    """Return a value with its interval as HTML."""
    if found["low"] is None:
        return axis.shown(found["value"])
    ends = f"{axis.shown(found['low'])} to {axis.shown(found['high'])}"
    return f'{axis.shown(found["value"])}<br><span class="interval">{ends}</span>'


def pictures_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the shown images of every point with their acceptance maps."""
    if not any(point["portraits"] for point in points):
        return "<p>No images were stored.</p>"
    heads = [
        f"{escape(one['prompt'])}<br><span class=note>image number {one['number']}</span>"
        for one in points[0]["portraits"]
    ]
    rows = [pictures_row(number, point) for number, point in enumerate(points)]
    words = (
        "<p>Left: the image. Right: the image with its acceptance map. Shades show how many codes the same pass of "
        "the target committed; dots mark codes that were accepted only because of a relaxation.</p>"
    )
    return f"{words}{legend()}{html_table('point', heads, rows, kind='faces')}"


def pictures_row(number: int, point: Mapping[str, Any]) -> str:
    """Return the images of one point as a table row."""
    cells, maps = [], [AcceptanceMap.from_dict(one["map"]) for one in point["portraits"]]
    for one, accepted in zip(point["portraits"], maps, strict=True):
        prompt, picture = one["prompt"], one["picture"]
        share = f"{100 * accepted.share(LONG_RUN):.0f} % of codes in runs of {LONG_RUN} or more"
        title = f"{point['label']}, {prompt}: {share}"
        face = f'<img class="face" alt="{escape(prompt)}" src="{escape(picture)}">' if picture else ""
        cells.append(f"<td>{face} {draw_map(accepted, picture, title=title)}</td>")
    share = f"{100 * mean_share(maps, LONG_RUN):.0f} %" if maps else "?"
    words = f"τ {point['step_compression']['value']:.2f}, {share} of codes in runs of {LONG_RUN} or more"
    head = f'<th class="left">{number}&ensp;{escape(point["label"])}<br><span class="note">{words}</span></th>'
    return f"<tr>{head}{''.join(cells)}</tr>"


def depths_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Return acceptance by depth: of reached nodes with drafted children, the share with an accepted child."""
    drafted = [(number, point) for number, point in enumerate(points) if point["depths"]]
    most = max((len(point["depths"]) for _, point in drafted), default=0)
    if not most:
        return "<p>No point uses drafts.</p>"
    rows = []
    for number, point in drafted:
        cells = "".join(f"<td>{depth_cell(one)}</td>" for one in point["depths"])
        rows.append(f'<tr><th class="left">{number}&ensp;{escape(point["label"])}</th>{cells}</tr>')
    words = "Of the passes that reached a depth with drafted codes to test, the share that accepted one."
    return f"<p>{words}</p>{html_table('point, depth', map(str, range(1, most + 1)), rows)}"


def depth_cell(found: Mapping[str, Any]) -> str:
    """Return a share as a bar and a number."""
    share = found["accepted"] / found["reached"]
    words = f"{found['accepted']} of {found['reached']}"
    return f'<span title="{words}"><span class="bar" style="width:{2.5 * share:.2f}em"></span>{share:.2f}</span>'


def html_table(first: str, heads: Iterable[str], rows: Iterable[str], *, kind: str = "") -> str:
    """Return a table of rows, whose first column is left-aligned; `kind` is its class."""
    cells = "".join(f"<th>{head}</th>" for head in heads)
    head = f'<thead><tr><th class="left">{first}</th>{cells}</tr></thead>'
    tag = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{tag}{head}<tbody>{"".join(rows)}</tbody></table></div>'


def save_page(figures: Mapping[str, Any], plot: Path, path: Path) -> Path:
    """Write the page; `plot` is the SVG to embed. ValueError for a page larger than MOST_BYTES."""
    page = render(figures, plot.read_bytes())
    if (size := len(page.encode())) > MOST_BYTES:
        raise ValueError(f"the page has {size} bytes, expected at most {MOST_BYTES}: lower --shown")
    return write_text(path, page)
