"""Text tables of bench figures, at most 120 columns wide."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 120
ROOFLINE = "  roofline: seconds to read weights and half of the cache at copy bandwidth, as a share of a step's seconds"


def render(figures: Mapping[str, Any]) -> str:
    """Return all tables of a model's or a size's figures."""
    lines = list(_heading(figures))
    lines += _model_lines(figures) if figures["what"] == "model" else _shape_lines(figures)
    for failure in figures["failed"]:
        lines.append(f"not measured: {failure['method']} {failure['variant']}: {failure['reason']}")
    for one in figures.get("left_out", ()):
        lines.append(f"left out: {one['variant']}, {one['pass_ms']:g} ms a pass of plain decoding")
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return rows as aligned lines: the first `left` columns left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _heading(figures: Mapping[str, Any]) -> Iterator[str]:
    where, load = figures["surroundings"], figures["load_average"]
    what = f"model {figures['model']}" if figures["what"] == "model" else f"LlamaGen-{figures['shape']}, random weights"
    commit = "" if where["commit"] == where["lantern"] else f", commit {where['commit'][:12]}"  # none in a wheel
    yield f"{what}; lantern {where['lantern']}{commit}"
    yield f"torch {where['torch']}, torchao {where['torchao'] or 'none'}, python {where['python']}"
    yield f"{where['gpu'] or where['cpu']}, {where['threads']} threads of {where['cores']} cores"
    begin, end = (_load(load[when]) for when in ("begin", "end"))
    yield f"load average {begin} before, {end} after; copy bandwidth {figures['copy_gbps']:.1f} GB/s"


def _load(values: Sequence[float] | None) -> str:
    return "unknown" if values is None else "/".join(f"{value:.2f}" for value in values)


def _model_lines(figures: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for race in figures["races"]:
        lines += ["", f"batch {race['batch']}: {race['rounds']} rounds, {race['images']} images each, interleaved"]
        header = ("method", "run as", "s median", "p10", "p90", "images/s", "tau", "roofline", "TV per code")
        rows = [header, *(_contender(one) for one in race["contenders"])]
        lines += aligned(rows, left=2)
        lines += [_baseline(race["contenders"], race["results"]), ROOFLINE]
        lines += [_result(result) for result in race["results"]]
        lines += [_identity(one) for one in race["identity"]]
        lines += _most(race["bounds"])
    lines += ["", *_phase_lines(figures["phases"])]
    lines += _curve_lines(figures["verify"], figures["races"][0]["batch"])
    if figures["memory"]:
        lines += ["", "peak memory of one image: weights, memory added by decoding, ratio of the sum to plain's"]
        rows = [("method", "dtype", "weights MiB", "added MiB", "ratio")]
        rows += [
            (one["method"], one["dtype"], f"{one['weights']:.1f}", f"{one['added']:.1f}", f"{one['ratio']:.2f}")
            for one in figures["memory"]
        ]
        lines += aligned(rows, left=2)
    beside = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in figures["beside"].items())
    return [*lines, "", f"outside decoding, the same for every method: {beside or 'nothing'}"]


def _contender(one: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = one["seconds"]
    return (
        one["method"],
        f"{one['variant']} {one['dtype']}",
        *(f"{seconds[name]:.3f}" for name in ("median", "p10", "p90")),
        f"{one['images_per_second']:.2f}",
        f"{one['step_compression']:.2f}",
        f"{one['roofline']:.0%}",
        "exact" if one["exact"] else f"{one['total_variation']:.3f}",
    )


def _baseline(contenders: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    """Return which plain decoding methods are compared with, and how many variants of it ran."""
    plain = sum(one["method"] == "plain" for one in contenders)
    name = results[0]["baseline"] if results else "none"
    return f"  baseline: plain as {name}, the fastest of the {plain} variants of plain decoding above"


def _most(bounds: Mapping[str, float | None]) -> list[str]:
    known = ", ".join(f"{label}: {bound:.2f}x" for label, bound in bounds.items() if bound is not None)
    text = f"upper bound on speedup, if only the target's passes took time: {known or 'unknown'}"
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _result(result: Mapping[str, Any]) -> str:
    low, high = result["interval_95"]
    ratio = f"{result['ratio_of_medians']:.2f}x (by rounds {result['median_of_ratios']:.2f}, {low:.2f} to {high:.2f})"
    sides = f"{result['method']} as {result['variant']} over plain as {result['baseline']}"
    return f"  {sides}: {ratio}" if result["claim"] is not None else f"  {sides}: {result['refusal']}"


def _identity(one: Mapping[str, Any]) -> str:
    what = f"  {one['method']} as {one['variant']}"
    if not one["differing_codes"]:
        return f"{what}: no code differs from plain decoding in {one['images']} images"
    return f"{what}: codes differ from plain decoding in {one['differing_images']} of {one['images']} images"


def _phase_lines(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("method", "run as", "batch", "step ms", "pass ms", "GB/s", "of copy", "draft step", "host")
    rows: list[tuple[str, ...]] = [header]
    shares = []
    for one in phases:
        layers = one["draft_step_layers"]
        rows.append(
            (
                one["method"],
                one["variant"],
                str(one["batch"]),
                f"{one['step_ms']:.2f}",
                _or_dash(one["pass_ms"], ".2f"),
                _or_dash(one["gbps"], ".1f"),
                _or_dash(one["share_of_copy"], ".0%"),
                "-" if layers is None else f"{layers:.2f} layers",
                _or_dash(one["host_share"], ".0%"),
            )
        )
        parts = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items())
        shares.append(f"  {one['method']} as {one['variant']}, batch {one['batch']}: {parts}")
    return ["time of a step by phase (host: everything outside the two networks)", *aligned(rows, left=2), *shares]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shape_lines(figures: Mapping[str, Any]) -> list[str]:
    tree = figures["tree"]
    lines = _curve_lines(figures["verify"], figures["batch"])
    lines += [
        "",
        f"scripted acceptance, tree {tree['name']} ({tree['nodes']} nodes, depth {tree['depth']}), "
        f"{figures['drafter']}",
    ]
    rows: list[tuple[str, ...]] = [("method", "run as", "ms per code", "p10", "p90", "codes/s", "roofline")]
    for one in figures["contenders"]:
        spent = [f"{one['ms_per_code'][name]:.2f}" for name in ("median", "p10", "p90")]
        variant = f"{one['variant']} {one['dtype']}"
        rows.append((one["method"], variant, *spent, f"{one['codes_per_second']:.1f}", f"{one['roofline']:.0%}"))
    lines += aligned(rows, left=2)
    lines += [_baseline(figures["contenders"], figures["results"]), ROOFLINE]
    lines += [_result(result) for result in figures["results"]]
    lines += _most(figures["bounds"])
    return [*lines, "", *_phase_lines(figures["phases"])]


def _curve_lines(curves: Sequence[Mapping[str, Any]], batch: int) -> list[str]:
    lines = ["", f"T(n) / T(1) of scoring n nodes, batch {batch}; also the codes per pass at which n nodes break even"]
    for curve in curves:
        rows = [
            ("n", *map(str, curve["nodes"])),
            ("ms", *(f"{value:.1f}" for value in curve["ms"])),
            ("T(n)/T(1)", *(f"{value:.2f}" for value in curve["over_one"])),
        ]
        lines += [f"  {curve['variant']}: {curve['gbps']:.1f} GB/s at n = 1, {curve['share_of_copy']:.0%} of a copy"]
        lines += aligned(rows)
    return lines
