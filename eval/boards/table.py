"""The table of a board: figures computed from its lines, each with its interval, and their Markdown.

Intervals are paired: images, or rounds of the clock, are resampled for both sides of a ratio together. Verdicts on
pairs are by Wilcoxon's signed-rank test of images, with Holm's correction over all pairs of the file.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lantern.core.config import read_json_object
from lantern.eval.boards.board import at_temperature, name_of, rounds_of, unpack
from lantern.eval.json_lines import Line, read_lines
from lantern.eval.metrics.distances import Estimate, bootstrap, mean_estimate
from lantern.eval.speed.contenders import PLAIN
from lantern.eval.speed.race import Spread, compare, rounded

LEAST = 3  # images, below which there is no verdict
BACKGROUND = 0.1  # share of all tokens from which on the most frequent one counts as background
MOST = 1 << 26  # bytes of a file of figures
LEVEL = 0.05  # of the family of all pairs
HEADER = (
    "method", "promise", "tokens per step", "in the foreground", "speedup", "over the fastest plain", "TV per token",
    "differs from plain", "against", "tokens per step, ratio", "verdict",
)  # fmt: skip
RELAXED, TOKENS, DISTRIBUTION = "relaxed", "tokens", "distribution"


def figures_of(path: Path) -> dict[str, Any]:
    """Return the figures of a file of lines, or of one of figures; ValueError for other files."""
    try:
        found = read_json_object(path, most=MOST)
    except ValueError:  # it has several lines
        found = {}
    if "boards" in found:
        return found
    header, lines = read_lines(path) if "what" not in found else ({}, [])
    if header.get("what") != "leaderboard":
        raise ValueError(f"{path} holds no leaderboard: give a file that `lantern leaderboard` wrote")
    return figures(header, lines)


def figures(header: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of a board for JSON: the header, one board per temperature, failures of exact methods.

    ValueError for lines without plain decoding.
    """
    temperatures = header["sampling"]["temperature"]
    background = background_of(images_of(at_temperature(lines, temperatures[0]), name_of(PLAIN, header["variant"])))
    boards = [board_of(header, at_temperature(lines, one), one, background) for one in temperatures]
    rows = [row for board in boards for row in board["rows"]]
    correct([pair for row in rows for pair in row["against"]])
    return {
        **header,
        "background": background,
        "commits": list(dict.fromkeys(line["commit"] for line in lines if "round" in line)),
        "boards": boards,
        "failures": list(dict.fromkeys(row["failure"] for row in rows if "failure" in row)),
    }


def board_of(header: Line, lines: Sequence[Line], temperature: float, background: int | None) -> dict[str, Any]:
    """Return the figures at one temperature: baseline, plain decoding, one row per method.

    `speedup` is over plain decoding in the same engine, `over_fastest` over its fastest variant.
    """
    plain = name_of(PLAIN, header["variant"])
    seconds = {name: [line["seconds"] for line in rounds_of(lines, name).values()] for name in header["plain"]}
    measured = [name for name in header["plain"] if seconds[name]]
    if plain not in measured:
        raise ValueError("the file has no rounds of plain decoding: let the run reach its first round")
    baseline = min(measured, key=lambda name: Spread.of(seconds[name]).median)
    return {
        "temperature": temperature,
        "images": len(images_of(lines, plain)),
        "baseline": baseline,
        "plain": {name: Spread.of(seconds[name]).as_dict() for name in measured},
        "tokens_per_step": estimate(tokens_per_step(images_of(lines, plain), header["tokens"])),
        "load": [line["load"][0] for line in rounds_of(lines, plain).values() if line["load"]],
        "quality_of_plain": quality_of(lines, plain),
        "rows": [row_of(header, lines, spec, temperature, baseline, background) for spec in header["methods"]],
    }


def background_of(images: Sequence[Line]) -> int | None:
    """Return the most frequent token of plain decoding's images, if it is frequent enough to be a background."""
    counts = unpack([image["tokens"] for image in images]).flatten().bincount() if images else torch.zeros(1)
    return int(counts.argmax()) if counts.max() > BACKGROUND * counts.sum() else None


def row_of(
    header: Line, lines: Sequence[Line], spec: str, temperature: float, baseline: str, background: int | None
) -> dict[str, Any]:
    """Return the figures of a method, or the reason why it has none."""
    name, plain = (name_of(one, header["variant"]) for one in (spec, PLAIN))
    facts = header["methods"][spec]
    promise = TOKENS if temperature == 0 and facts["promise"] == DISTRIBUTION else facts["promise"]
    mine, row = rounds_of(lines, name), {"method": spec, "promise": promise, "against": []}
    if not mine:
        why = next((line for line in lines if line.get("absent") == name), {"status": "lacking", "reason": "not run"})
        row |= {"reason": why["reason"]}
        return row | ({"failure": f"{spec} failed: {why['reason']}"} if why["status"] == "failed" else {})
    images, tokens = images_of(lines, name), header["tokens"]
    moved = torch.tensor([image["total_variation"] / tokens for image in images], dtype=torch.float64)
    row |= {"images": len(images), "tokens_per_step": estimate(tokens_per_step(images, tokens))}
    row |= {"total_variation": estimate(mean_estimate(moved, seed=0))}
    if all("runs" in image for image in images):
        steps = sum(len(image["runs"].split()) for image in images)
        row["nodes_per_step"] = rounded(sum(image["nodes"] for image in images) / steps)
        if background is not None:
            row["foreground"] = estimate(foreground(images, background))
    for key, other in (("speedup", plain), ("over_fastest", baseline)):
        both = [(line, mine[n]) for n, line in rounds_of(lines, other).items() if n in mine]
        ratio = compare(*([line["seconds"] for line in side] for side in zip(*both, strict=True)), images=len(images))
        row[key] = ratio.as_dict()
    if promise == TOKENS:
        row |= identity(lines, name, plain)
        if row["differing_images"] and header["variant"].endswith("fp32"):
            row["failure"] = f"{spec} differs from plain decoding in {row['differing_images']} of {len(images)} images"
    if promise == RELAXED:
        row["changes"] = changes(quality_of(lines, name), quality_of(lines, plain))
    against = [other for one, other in header["pairs"] if one == spec]
    return row | {"against": [pair_of(header, lines, spec, other) for other in against]}


def pair_of(header: Line, lines: Sequence[Line], spec: str, other: str) -> dict[str, Any]:
    """Return the paired comparison of two methods over the images that both made; `correct` adds the verdict.

    There is none where the networks that only one of them reads were trained for another number of steps.
    """
    sides = [rounds_of(lines, name_of(one, header["variant"])) for one in (spec, other)]
    both = sorted(set(sides[0]) & set(sides[1]))
    mine, its = ([image for n in both for image in side[n]["images"]] for side in sides)
    if len(mine) < LEAST:
        return {"method": other, "reason": f"{len(mine)} images by both, wanted at least {LEAST}"}
    steps, apart = (
        np.array([float(a[key]) - float(b[key]) for a, b in zip(mine, its, strict=True)])
        for key in ("steps", "total_variation")
    )
    difference = mean_estimate(torch.from_numpy(apart / header["tokens"]), seed=0)
    found = {"method": other, "images": len(mine), "tokens_ratio": estimate(tokens_ratio(mine, its))}
    found |= {"variation": estimate(difference), "p": {"tokens": p_value(steps), "variation": p_value(apart)}}
    refusal = refusal_of(*(header["methods"][one]["training"] for one in (spec, other)))
    return found | ({"reason": refusal} if refusal else {})


def p_value(differences: np.ndarray) -> float | None:
    """Return the p-value of Wilcoxon's test of paired differences; None if there are none."""
    from scipy.stats import wilcoxon

    if not differences.any():
        return None
    found: Any = wilcoxon(differences)
    return rounded(float(found.pvalue))


def correct(pairs: Sequence[dict[str, Any]]) -> None:
    """Add the verdicts of pairs: what Holm's correction over all their tests leaves.

    The smallest p-value is multiplied by the number of tests, the next by one less, each at least the one before.
    """
    tests = [(pair, key) for pair in pairs if "p" in pair for key, p in pair["p"].items() if p is not None]
    tests.sort(key=lambda test: test[0]["p"][test[1]])
    largest = 0.0
    for number, (pair, key) in enumerate(tests):
        largest = max(largest, min(pair["p"][key] * (len(tests) - number), 1.0))
        pair.setdefault("p_holm", {})[key] = rounded(largest)
    for pair in pairs:
        if "p" in pair and "reason" not in pair:
            pair["verdict"] = verdict(pair)


def verdict(pair: Mapping[str, Any]) -> str:
    """Return what is significant: more or fewer tokens per step, more or less total variation."""
    words = []
    for key, of, equal, noun in (
        ("tokens", "tokens_ratio", 1.0, "tokens per step"),
        ("variation", "variation", 0.0, "total variation"),
    ):
        if pair.get("p_holm", {}).get(key, 1.0) < LEVEL:
            less = "fewer" if key == "tokens" else "less"
            words.append(f"{'more' if pair[of]['value'] > equal else less} {noun}")
    return ", ".join(words) or "none"


def images_of(lines: Sequence[Line], name: str) -> list[Line]:
    """Return the records of a contender's images, in order."""
    return [image for line in rounds_of(lines, name).values() for image in line["images"]]


def tokens_per_step(images: Sequence[Line], tokens: int) -> Estimate:
    """Return tokens per step of the target over all images, with its interval."""
    steps = torch.tensor([[image["steps"]] for image in images], dtype=torch.float64)
    return bootstrap(steps, lambda sampled: tokens / sampled[..., 0].mean(-1), seed=0)


def foreground(images: Sequence[Line], background: int) -> Estimate:
    """Return tokens per step over tokens other than the background's; each token costs an equal share of its step."""
    sums = []
    for image, tokens in zip(images, unpack([image["tokens"] for image in images]), strict=True):
        runs = torch.tensor([int(run) for run in image["runs"].split()])
        shares = (1 / runs.double()).repeat_interleave(runs)
        sums.append([float((tokens != background).sum()), float(shares[tokens != background].sum())])
    table = torch.tensor(sums, dtype=torch.float64)
    return bootstrap(table, lambda sampled: sampled[..., 0].sum(-1) / sampled[..., 1].sum(-1), seed=0)


def tokens_ratio(mine: Sequence[Line], other: Sequence[Line]) -> Estimate:
    """Return tokens per step of one method over the other's, on the same images."""
    table = torch.tensor([[float(b["steps"]), float(a["steps"])] for a, b in zip(mine, other, strict=True)])
    return bootstrap(table.double(), lambda sample: sample[..., 0].mean(-1) / sample[..., 1].mean(-1), seed=0)


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


def estimate(found: Estimate) -> dict[str, float]:
    """Return an estimate with an interval for JSON."""
    assert found.low is not None and found.high is not None
    return {"value": rounded(found.value), "low": rounded(found.low), "high": rounded(found.high)}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of each temperature with a line that states what was measured with."""
    return "\n".join(line for board in found["boards"] for line in board_lines(found, board))


def board_lines(found: Mapping[str, Any], board: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one temperature."""
    where, loads = found["surroundings"], sorted(board["load"]) or [math.nan]
    plain = ["plain", TOKENS, interval(board["tokens_per_step"]), *[""] * (len(HEADER) - 3)]
    yield (
        f"Model {found['model']} ({found['weights'][:12]}), {found['variant']}, seed {found['seed']}, guidance "
        f"{found['sampling']['guidance']:g}, temperature {board['temperature']:g}, {board['images']} images; "
        f"{where['gpu'] or where['cpu']}, {where['threads']} threads, load {loads[0]:.1f} to {loads[-1]:.1f}; torch "
        f"{where['torch']}, commit {', '.join(commit[:12] for commit in found['commits'])}. The fastest plain decoding "
        f"is {board['baseline'].partition(' | ')[2]}. Brackets: 95 % intervals, paired by seed. ?: no claim: fewer "
        "than 10 images, times that vary too much, or an interval that contains 1."
    )
    rows = [cells for row in board["rows"] for cells in cells_of(row)]
    yield from ("", *markdown_lines([HEADER, plain, *rows]), "")
    changed = [f"- {row['method']}: {changed_words(row['changes'])}" for row in board["rows"] if row.get("changes")]
    if changed:
        yield from ("Change of metrics from plain decoding; * marks what chance does not explain.", "", *changed, "")


def markdown_lines(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of a Markdown table, the first its header; columns other than `left` are right-aligned."""
    rule = ["---" if column in left else "---:" for column in range(len(lines[0]))]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (lines[0], rule, *lines[1:])
    ]


def cells_of(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a method: one line, and one more for each further method that it is compared with."""
    own = len(HEADER) - 3
    if "reason" in row:
        return [[row["method"], row["promise"], f"not measured: {row['reason']}", *[""] * own]]
    differs = f"{row['differing_images']} of {row['images']} images" if "differing_images" in row else ""
    moved = f"{row['total_variation']['value']:.4f}" if row["promise"] == RELAXED else "0"
    speeds = [speed_words(row[name]) for name in ("speedup", "over_fastest")]
    rates = [interval(row[name]) if name in row else "" for name in ("tokens_per_step", "foreground")]
    first = [row["method"], row["promise"], *rates, *speeds, moved, differs]
    pairs = [pair_cells(pair) for pair in row["against"]] or [[""] * 3]
    return [[*(first if i == 0 else [""] * own), *pair] for i, pair in enumerate(pairs)]


def pair_cells(pair: Mapping[str, Any]) -> list[str]:
    """Return the cells of a comparison: the other method, the ratio, the verdict."""
    ratio = interval(pair["tokens_ratio"]) if "tokens_ratio" in pair else ""
    return [pair["method"], ratio, pair.get("verdict") or pair["reason"]]


def speed_words(ratio: Mapping[str, Any], mark: str = " ?") -> str:
    """Return a speedup with its interval by rounds, marked if it is no claim."""
    low, high = ratio["interval_95"]
    return f"{ratio['ratio_of_medians']:.2f} ({low:.2f} to {high:.2f}){'' if ratio['claim'] is not None else mark}"


def interval(found: Mapping[str, Any], form: str = ".2f") -> str:
    """Return a value with its interval; the value alone where all images agree."""
    value, low, high = (format(found[name], form) for name in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def changed_words(found: Mapping[str, Any]) -> str:
    """Return the changes of metrics as text."""
    return ", ".join(f"{name} {interval(one, '+.4f')}{'' if one['is_within'] else ' *'}" for name, one in found.items())
