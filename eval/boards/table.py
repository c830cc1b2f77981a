"""The table of a board: figures computed from its lines, each with its interval, and their Markdown.

Intervals are paired: images, or rounds of the clock, are resampled for both sides of a ratio together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lantern.eval.boards.board import name_of, rounds_of, unpack
from lantern.eval.json_lines import Line
from lantern.eval.metrics.distances import Estimate, bootstrap, mean_estimate
from lantern.eval.speed.contenders import PLAIN
from lantern.eval.speed.race import Spread, compare

LEAST = 3  # images, below which there is no verdict
HEADER = (
    "method", "promise", "tokens per step", "speedup", "over the fastest plain", "TV per token", "differs from plain",
    "against", "tokens per step, ratio", "verdict",
)  # fmt: skip
RELAXED, TOKENS = "relaxed", "tokens"


def figures(header: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of a board for JSON: baseline, one row per method, failures of exact methods.

    `speedup` is over plain decoding in the same engine, `over_fastest` over its fastest variant. ValueError for lines
    without plain decoding.
    """
    variant = header["variant"]
    plain = name_of(PLAIN, variant)
    seconds = {name: [line["seconds"] for line in rounds_of(lines, name).values()] for name in header["plain"]}
    measured = [name for name in header["plain"] if seconds[name]]
    if plain not in measured:
        raise ValueError("the file has no rounds of plain decoding: let the run reach its first round")
    baseline = min(measured, key=lambda name: Spread.of(seconds[name]).median)
    rows = [row_of(header, lines, spec, plain, baseline) for spec in header["methods"]]
    return {
        "baseline": baseline,
        "plain": {name: Spread.of(seconds[name]).as_dict() for name in measured},
        "tokens_per_step": estimate(tokens_per_step(images_of(lines, plain), header["tokens"])),
        "commits": list(dict.fromkeys(line["commit"] for line in lines if "round" in line)),
        "load": [line["load"][0] for line in rounds_of(lines, plain).values() if line["load"]],
        "quality_of_plain": quality_of(lines, plain),
        "rows": rows,
        "failures": [row["failure"] for row in rows if "failure" in row],
    }


def row_of(header: Line, lines: Sequence[Line], spec: str, plain: str, baseline: str) -> dict[str, Any]:
    """Return the figures of a method, or the reason why it has none."""
    name, facts = name_of(spec, header["variant"]), header["methods"][spec]
    mine, row = rounds_of(lines, name), {"method": spec, "promise": facts["promise"]}
    if not mine:
        why = next((line for line in lines if line.get("absent") == name), {"status": "lacking", "reason": "not run"})
        row |= {"reason": why["reason"]}
        return row | ({"failure": f"{spec} failed: {why['reason']}"} if why["status"] == "failed" else {})
    images, tokens = images_of(lines, name), header["tokens"]
    moved = torch.tensor([image["total_variation"] / tokens for image in images], dtype=torch.float64)
    row |= {"images": len(images), "tokens_per_step": estimate(tokens_per_step(images, tokens))}
    row |= {"total_variation": estimate(mean_estimate(moved, seed=0))}
    for key, other in (("speedup", plain), ("over_fastest", baseline)):
        both = [(line, mine[n]) for n, line in rounds_of(lines, other).items() if n in mine]
        ratio = compare(*([line["seconds"] for line in side] for side in zip(*both, strict=True)), images=len(images))
        row[key] = ratio.as_dict()
    if facts["promise"] == TOKENS:
        row |= identity(lines, name, plain)
        if row["differing_images"] and header["variant"].endswith("fp32"):
            row["failure"] = f"{spec} differs from plain decoding in {row['differing_images']} of {len(images)} images"
    if facts["promise"] == RELAXED:
        row["changes"] = changes(quality_of(lines, name), quality_of(lines, plain))
    against = [other for one, other in header["pairs"] if one == spec]
    return row | {"against": [pair_of(header, lines, spec, other) for other in against]}


def pair_of(header: Line, lines: Sequence[Line], spec: str, other: str) -> dict[str, Any]:
    """Return the paired comparison of two methods over the images that both made.

    There is a verdict only where the interval excludes equality and the networks that only one of them reads were
    trained for the same number of steps.
    """
    sides = [rounds_of(lines, name_of(one, header["variant"])) for one in (spec, other)]
    both = sorted(set(sides[0]) & set(sides[1]))
    mine, its = ([image for n in both for image in side[n]["images"]] for side in sides)
    if len(mine) < LEAST:
        return {"method": other, "reason": f"{len(mine)} images by both, wanted at least {LEAST}"}
    ratio = tokens_ratio(mine, its)
    apart = [(a["total_variation"] - b["total_variation"]) / header["tokens"] for a, b in zip(mine, its, strict=True)]
    difference = mean_estimate(torch.tensor(apart, dtype=torch.float64), seed=0)
    refusal = refusal_of(*(header["methods"][one]["training"] for one in (spec, other)))
    found = {"method": other, "tokens_ratio": estimate(ratio), "variation": estimate(difference)}
    return found | ({"reason": refusal} if refusal else {"verdict": verdict(ratio, difference)})


def images_of(lines: Sequence[Line], name: str) -> list[Line]:
    """Return the records of a contender's images, in order."""
    return [image for line in rounds_of(lines, name).values() for image in line["images"]]


def tokens_per_step(images: Sequence[Line], tokens: int) -> Estimate:
    """Return tokens per step of the target over all images, with its interval."""
    steps = torch.tensor([[image["steps"]] for image in images], dtype=torch.float64)
    return bootstrap(steps, lambda sampled: tokens / sampled[..., 0].mean(-1), seed=0)


def tokens_ratio(mine: Sequence[Line], other: Sequence[Line]) -> Estimate:
    """Return tokens per step of one method over the other's, on the same images."""
    table = torch.tensor([[float(b["steps"]), float(a["steps"])] for a, b in zip(mine, other, strict=True)])
    return bootstrap(table.double(), lambda sample: sample[..., 0].mean(-1) / sample[..., 1].mean(-1), seed=0)


def verdict(ratio: Estimate, difference: Estimate) -> str:
    """Return what the whole intervals say: more or fewer tokens per step, more or less total variation."""
    words = []
    for found, equal, above, below in (
        (ratio, 1.0, "more tokens per step", "fewer tokens per step"),
        (difference, 0.0, "more total variation", "less total variation"),
    ):
        assert found.low is not None and found.high is not None
        if not found.low <= equal <= found.high:
            words.append(above if found.value > equal else below)
    return ", ".join(words) or "none"


def refusal_of(mine: Mapping[str, int | None], other: Mapping[str, int | None]) -> str | None:
    """Return why training of other or unknown length allows no verdict; networks that both read do not matter."""
    own, its = ({k: v for k, v in one.items() if k not in two} for one, two in ((mine, other), (other, mine)))
    if not own or not its or set(own.values()) == set(its.values()) != {None}:
        return None
    listed = ("; ".join(f"{name} {steps or 'not recorded'}" for name, steps in one.items()) for one in (own, its))
    return f"trained for other numbers of steps: {' and '.join(listed)}"


def identity(lines: Sequence[Line], name: str, plain: str) -> dict[str, int]:
    """Count images and tokens that differ from plain decoding in the same engine."""
    mine, its = rounds_of(lines, name), rounds_of(lines, plain)
    both = [(mine[n]["images"], its[n]["images"]) for n in mine if n in its]
    sides = (unpack([image["tokens"] for pair in both for image in pair[side]]) for side in (0, 1))
    differing = torch.ne(*sides).sum(1)
    return {"differing_images": int((differing > 0).sum()), "differing_tokens": int(differing.sum())}


def quality_of(lines: Sequence[Line], name: str) -> dict[str, Any]:
    """Return the metrics of a contender's images, of the last line that has them."""
    found = [line["metrics"] for line in lines if line.get("quality") == name]
    return found[-1] if found else {}


def changes(mine: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of metrics from plain decoding, and whether chance explains them (`is_within`).

    The interval of a difference is from those of both (Zou and Donner 2008, equation 2).
    """
    found = {}
    for name in (name for name in mine if name in plain and plain[name]["low"] is not None):
        value = mine[name]["value"] - plain[name]["value"]
        (below, above), (its_below, its_above) = reach(mine[name]), reach(plain[name])
        interval = {"low": value - math.hypot(below, its_above), "high": value + math.hypot(above, its_below)}
        found[name] = {"value": value, **interval, "is_within": abs(value) <= math.hypot(its_below, its_above)}
    return found


def reach(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lengths of an interval below and above its value; 0 without an interval."""
    if found["low"] is None:
        return 0.0, 0.0
    return max(found["value"] - found["low"], 0.0), max(found["high"] - found["value"], 0.0)


def estimate(found: Estimate) -> dict[str, Any]:
    """Return an estimate for JSON."""
    return {name: value for name, value in asdict(found).items() if name != "means"}


def markdown(header: Line, found: Mapping[str, Any]) -> str:
    """Return the table with a line that states what was measured with."""
    where, sampling = header["surroundings"], header["sampling"]
    rows = [cells for row in found["rows"] for cells in cells_of(row)]
    plain = ["plain", TOKENS, interval(found["tokens_per_step"]), *[""] * 7]
    changed = [f"- {row['method']}: {changed_words(row['changes'])}" for row in found["rows"] if row.get("changes")]
    loads = sorted(found["load"]) or [math.nan]
    return "\n".join(
        [
            f"Model {header['model']} ({header['weights'][:12]}), {header['variant']}, seed {header['seed']}, guidance "
            f"{sampling['guidance']:g}, temperature {sampling['temperature']:g}; {where['gpu'] or where['cpu']}, "
            f"{where['threads']} threads, load {loads[0]:.1f} to {loads[-1]:.1f}; torch {where['torch']}, commit "
            f"{', '.join(commit[:12] for commit in found['commits'])}. The fastest plain decoding is "
            f"{found['baseline'].partition(' | ')[2]}. Brackets: 95 % intervals, paired by seed. ?: no claim: "
            "fewer than 10 images, times that vary too much, or an interval that contains 1.",
            "",
            *markdown_lines(HEADER, [plain, *rows]),
            *(["", "Change of metrics from plain decoding; * marks what chance does not explain.", ""] * bool(changed)),
            *changed,
            "",
        ]
    )


def markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, the first column left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def cells_of(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a method: one line, and one more for each further method that it is compared with."""
    if "reason" in row:
        return [[row["method"], row["promise"], f"not measured: {row['reason']}", *[""] * 7]]
    differs = f"{row['differing_images']} of {row['images']} images" if "differing_images" in row else ""
    moved = f"{row['total_variation']['value']:.4f}" if row["promise"] == RELAXED else "0"
    speeds = [speed_words(row[name]) for name in ("speedup", "over_fastest")]
    first = [row["method"], row["promise"], interval(row["tokens_per_step"]), *speeds, moved, differs]
    pairs = [pair_cells(pair) for pair in row["against"]] or [[""] * 3]
    return [[*(first if i == 0 else [""] * 7), *pair] for i, pair in enumerate(pairs)]


def pair_cells(pair: Mapping[str, Any]) -> list[str]:
    """Return the cells of a comparison: the other method, the ratio, the verdict."""
    ratio = interval(pair["tokens_ratio"]) if "tokens_ratio" in pair else ""
    return [pair["method"], ratio, pair.get("verdict") or pair["reason"]]


def speed_words(ratio: Mapping[str, Any]) -> str:
    """Return a speedup with its interval by rounds, marked if it is no claim."""
    low, high = ratio["interval_95"]
    return f"{ratio['ratio_of_medians']:.2f} ({low:.2f} to {high:.2f}){'' if ratio['claim'] is not None else ' ?'}"


def interval(found: Mapping[str, Any], form: str = ".2f") -> str:
    """Return a value with its interval; the value alone where all images agree."""
    value, low, high = (format(found[name], form) for name in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def changed_words(found: Mapping[str, Any]) -> str:
    """Return the changes of metrics as text."""
    return ", ".join(f"{name} {interval(one, '+.4f')}{'' if one['is_within'] else ' *'}" for name, one in found.items())
