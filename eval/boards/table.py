"""The figures of a board, computed from its lines, each with its interval, and their tables in Markdown.

Intervals are paired: images, or rounds of the clock, are resampled for both sides of a ratio together. Verdicts on
pairs are by Wilcoxon's signed-rank test of images, with Holm's correction over all pairs of the file. Tables are
printed, or are rows of a document between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lantern.core.config import read_json_object
from lantern.eval.boards.board import at_temperature
from lantern.eval.intervals import Estimate, bootstrap, mean_estimate
from lantern.eval.json_lines import Line, read_lines
from lantern.eval.speed.contenders import PLAIN, Variant, name_of
from lantern.eval.speed.race import compare, identity, images_of, paired, rounded, rounds_of, seconds_of, spread, unpack
from lantern.eval.speed.surroundings import short_commit
from lantern.methods import METHODS

LEAST = 3  # images, below which there is no verdict
BACKGROUND = 0.1  # share of all tokens from which on the most frequent one counts as background
MOST = 1 << 26  # bytes of a file of figures
LEVEL = 0.05  # of the family of all pairs
RELAXED, TOKENS, DISTRIBUTION = "relaxed", "tokens", "distribution"
ROWS = re.compile(r"(<!-- rows: (leaderboard|pairs) -->\n).*?(<!-- end rows -->)", re.S)
Board = Mapping[str, Any]


def figures_of(path: Path) -> dict[str, Any]:
    """Return the figures of a file of lines, or of one of figures; ValueError for other files."""
    try:
        found = read_json_object(path, most=MOST)
    except ValueError:  # it has several lines
        found = {}
    if "boards" in found:
        return found
    header, lines = read_lines(path) if path.is_file() and "what" not in found else ({}, [])
    if header.get("what") != "leaderboard":
        raise ValueError(f"{path} holds no leaderboard: give a file that `lantern leaderboard` wrote")
    return figures(header, lines)


def figures(header: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of a board for JSON, one board per temperature; ValueError without plain decoding's lines."""
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
    seconds = {name: seconds_of(lines, name) for name in header["plain"]}
    measured = [name for name in header["plain"] if seconds[name]]
    if plain not in measured:
        raise ValueError("the file has no rounds of plain decoding: let the run reach its first round")
    baseline = min(measured, key=lambda name: median(seconds[name]))
    return {
        "temperature": temperature,
        "images": len(images_of(lines, plain)),
        "baseline": baseline,
        "plain": {name: spread(seconds[name]) for name in measured},
        "tokens_per_step": estimate(ratio([(header["tokens"], image["steps"]) for image in images_of(lines, plain)])),
        "load": [line["load"][0] for line in rounds_of(lines, plain).values()],
        "quality_of_plain": quality_of(lines, plain, plain),
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
    images, row = images_of(lines, name), {"method": spec, "promise": promise, "against": []}
    own = [line for line in lines if name in (line.get("contender"), line.get("absent"))]
    last = own[-1] if own else {"reason": "not run"}
    if last.get("status") == "failed":
        row["failure"] = f"{spec} failed: {last['reason']}"
    if not images:
        return row | {"reason": last["reason"]}
    moved = torch.tensor([image["total_variation"] for image in images], dtype=torch.float64) / header["tokens"]
    rate = ratio([(header["tokens"], image["steps"]) for image in images])
    row |= {"images": len(images), "tokens_per_step": estimate(rate)}
    row |= {"total_variation": estimate(mean_estimate(moved, seed=0))}
    if all("runs" in image for image in images):
        steps = sum(len(image["runs"].split()) for image in images)
        row["nodes_per_step"] = rounded(sum(image["nodes"] for image in images) / steps)
        if background is not None:
            row["foreground"] = estimate(foreground(images, background))
    for key, other in (("speedup", plain), ("over_fastest", baseline)):
        seconds = [(its["seconds"], mine["seconds"]) for its, mine in paired(lines, other, name)]
        row[key] = compare(*zip(*seconds, strict=True))
    if promise == TOKENS:
        row |= identity(lines, name, plain)
        if row["differing_images"] and Variant(*header["variant"].split()).is_fp32:
            row["failure"] = f"{spec} differs from plain decoding in {row['differing_images']} of {len(images)} images"
    if promise == RELAXED:
        row["changes"] = changes(*(quality_of(lines, one, plain) for one in (name, plain)))
    against = [other for one, other in header["pairs"] if one == spec]
    return row | {"against": [pair_of(header, lines, spec, other) for other in against]}


def pair_of(header: Line, lines: Sequence[Line], spec: str, other: str) -> dict[str, Any]:
    """Return the paired comparison of two methods over the images that both made; `correct` adds the verdict.

    There is none where the networks that only one of them reads were trained for another number of steps.
    """
    both = paired(lines, *(name_of(one, header["variant"]) for one in (spec, other)))
    mine, its = ([image for pair in both for image in pair[side]["images"]] for side in (0, 1))
    if len(mine) < LEAST:
        return {"method": other, "reason": f"{len(mine)} images by both, wanted at least {LEAST}"}
    sides = [np.array([[float(one["steps"]), one["total_variation"]] for one in side]) for side in (mine, its)]
    steps, apart = (sides[0] - sides[1]).T
    difference = mean_estimate(torch.from_numpy(apart / header["tokens"]), seed=0)
    rate = ratio([(b["steps"], a["steps"]) for a, b in zip(mine, its, strict=True)])
    found = {"method": other, "images": len(mine), "tokens_ratio": estimate(rate), "variation": estimate(difference)}
    found["p"] = {"tokens": p_value(-steps, rate.value - 1), "variation": p_value(apart, difference.value)}
    refusal = refusal_of(*(header["methods"][one]["training"] for one in (spec, other)))
    return found | ({"reason": refusal} if refusal else {})


def p_value(differences: np.ndarray, side: float) -> float | None:
    """Return the p-value of Wilcoxon's paired test, 1 if its sign is not that of `side`; None if nothing differs."""
    from scipy.stats import wilcoxon

    if not differences.any():
        return None
    found: Any = wilcoxon(differences, alternative="greater" if side > 0 else "less")
    return rounded(min(2 * found.pvalue, 1.0))  # two-sided


def correct(pairs: Sequence[dict[str, Any]]) -> None:
    """Add verdicts by Holm's correction: the k-th p-value times the tests left, and at least the one before it."""
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
    """Return what is significant and has an interval without equality: tokens per step, total variation."""
    words = []
    for key, of, equal, less, noun in (
        ("tokens", "tokens_ratio", 1.0, "fewer", "tokens per step"),
        ("variation", "variation", 0.0, "less", "total variation"),
    ):
        is_more, is_less = pair[of]["low"] > equal, pair[of]["high"] < equal
        if pair.get("p_holm", {}).get(key, 1.0) < LEVEL and (is_more or is_less):
            words.append(f"{'more' if is_more else less} {noun}")
    return ", ".join(words) or "none"


def foreground(images: Sequence[Line], background: int) -> Estimate:
    """Return tokens per step over tokens other than the background's; each token costs an equal share of its step."""
    sums = list[tuple[float, float]]()
    for image, tokens in zip(images, unpack([image["tokens"] for image in images]), strict=True):
        runs = torch.tensor([int(run) for run in image["runs"].split()])
        shares = (1 / runs.double()).repeat_interleave(runs)
        sums.append((float((tokens != background).sum()), float(shares[tokens != background].sum())))
    return ratio(sums)


def ratio(rows: Sequence[tuple[float, float]]) -> Estimate:
    """Return the mean of first values over that of second ones, with its interval over rows, which are images."""
    table = torch.tensor(rows, dtype=torch.float64)
    return bootstrap(table, lambda sampled: sampled[..., 0].mean(-1) / sampled[..., 1].mean(-1), seed=0)


def refusal_of(mine: Mapping[str, int | None], other: Mapping[str, int | None]) -> str | None:
    """Return why training of other or unknown length allows no verdict; networks that both read do not matter."""
    own, its = ({k: v for k, v in one.items() if k not in two} for one, two in ((mine, other), (other, mine)))
    if not own or not its or set(own.values()) == set(its.values()) != {None}:
        return None
    listed = ("; ".join(f"{name} {steps or 'not recorded'}" for name, steps in one.items()) for one in (own, its))
    return f"trained for other numbers of steps: {' and '.join(listed)}"


def quality_of(lines: Sequence[Line], name: str, plain: str) -> dict[str, Any]:
    """Return the metrics of a contender's images, of the last line that was judged as the last of plain decoding."""
    judged = [line.get("judged") for line in lines if line.get("quality") == plain]  # earlier files do not state it
    found = [line["metrics"] for line in lines if line.get("quality") == name and line.get("judged") in judged[-1:]]
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
        found[name] = {"value": value, **interval, "is_within": interval["low"] <= 0 <= interval["high"]}
    return found


def reach(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lengths of an interval below and above its value; 0 without an interval."""
    if found["low"] is None:
        return 0.0, 0.0
    return max(found["value"] - found["low"], 0.0), max(found["high"] - found["value"], 0.0)


def estimate(found: Estimate) -> dict[str, float]:
    """Return an estimate with an interval for JSON."""
    return {"value": rounded(found.value), "low": rounded(found.low), "high": rounded(found.high)}


def check_page(text: str) -> None:
    """Raise ValueError for a document without a place for rows."""
    if not ROWS.search(text):
        raise ValueError("the page has no <!-- rows: leaderboard --> or <!-- rows: pairs --> before <!-- end rows -->")


def rendered(text: str, found: Mapping[str, Any]) -> str:
    """Return a document with the rows of these figures, other tables as they are; ValueError without a place.

    Rows of a page are measured together: ValueError for figures that lack methods of the page.
    """
    check_page(text)
    # a document lists methods at their own settings that exist still
    boards = [board | {"rows": [row for row in board["rows"] if row["method"] in METHODS]} for board in found["boards"]]
    tables = {"leaderboard": leaderboard_rows(boards), "pairs": pair_rows(found["boards"])}

    def filled(place: re.Match[str]) -> str:
        if len(rows := tables[place[2]]) <= 2:
            return place[0]
        there, here = ({*re.findall(r"^\| `([^`]+)`", one, re.M)} for one in (place[0], "\n".join(rows)))
        here |= {row["method"] for board in boards for row in board["rows"]}
        if lost := (there & METHODS.keys()) - here:
            raise ValueError(f"the page has methods that the file lacks ({len(lost)}, as {min(lost)}): measure them")
        return place[1] + "\n".join([*rows, place[3]])

    return ROWS.sub(filled, text)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the tables of each temperature, with a line that states what was measured with, and those of pairs."""
    lines = [line for board in found["boards"] for line in board_lines(found, board)]
    pairs = pair_rows(found["boards"])
    return "\n".join([*lines, *(pairs if len(pairs) > 2 else ())])


def board_lines(found: Mapping[str, Any], board: Board) -> Iterator[str]:
    """Yield the lines of one temperature."""
    where, loads = found["surroundings"], sorted(board["load"])
    commits = ", ".join(short_commit(one) for one in found["commits"] if one != where["lantern"])  # that of a wheel
    yield (
        f"Model {found['model']} ({found['weights'][:12]}), {found['variant']}, seed {found['seed']}, guidance "
        f"{found['sampling']['guidance']:g}, temperature {board['temperature']:g}, {board['images']} images; "
        f"{where['gpu'] or where['cpu']}, {where['threads']} threads, load {loads[0]:.1f} to {loads[-1]:.1f}; torch "
        f"{where['torch']}{', commit ' * bool(commits)}{commits}. The fastest plain decoding "
        f"is {board['baseline'].partition(' | ')[2]}. Brackets: 95 % intervals, paired by seed. *: no claim: fewer "
        "than 10 rounds, times that vary too much, or an interval that contains 1."
    )
    yield from ("", *leaderboard_rows([board]), "")
    yield from (f"- `{row['method']}` not measured: {row['reason']}" for row in board["rows"] if "reason" in row)
    if any(row.get("changes") for row in board["rows"]):
        yield "Change of metrics from plain decoding, intervals not paired; ! marks what chance does not explain."
    for row in board["rows"]:
        for name, one in row.get("changes", {}).items():
            yield f"- `{row['method']}`: {name} {interval(one, '+.4f')}{'' if one['is_within'] else ' !'}"


def leaderboard_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per measured method, those with the most tokens per step first; * marks what is no claim."""
    of = [{row["method"]: row for row in board["rows"] if "over_fastest" in row} for board in boards]
    rates = ["tokens_per_step", *["foreground"] * any("foreground" in row for row in of[0].values())]
    words = {"tokens_per_step": "tokens per step", "foreground": "in the foreground"}
    columns = [f"{words[rate]}, temperature {board['temperature']:g}" for board in boards for rate in rates]
    lines = [["method", *columns, "nodes", "speed over plain", "difference"]]
    for name, row in sorted(of[0].items(), key=lambda one: -one[1]["tokens_per_step"]["value"]):
        cells = [figure(known.get(name, {}), rate) for known in of for rate in rates]
        nodes = f"{row['nodes_per_step']:.1f}" if "nodes_per_step" in row else ""
        over, (low, high) = row["over_fastest"], row["over_fastest"]["interval_95"]
        speed = f"{over['median_of_ratios']:.2f} ({low:.2f} to {high:.2f}){'' if over['claim'] is not None else '*'}"
        lines.append([f"`{name}`", *cells, nodes, speed, difference(row)])
    return table(lines, left=(0, len(lines[0]) - 1))


def pair_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per pair and temperature, in the order of names; methods that are gone are left out."""
    lines = []
    for board in boards:
        for name, pair in ((row["method"], pair) for row in board["rows"] for pair in row["against"]):
            names = [name, pair["method"]]
            if all(re.split("[:@]", one)[0] in METHODS for one in names):
                ratio, moved = figure(pair, "tokens_ratio"), figure(pair, "variation", "+.3f")
                outcome = pair.get("reason") or pair["verdict"]
                lines.append([*(f"`{one}`" for one in names), f"{board['temperature']:g}", ratio, moved, outcome])
    header = ["method", "against", "temperature", "tokens per step", "total variation", "verdict"]
    return table([header, *sorted(lines, key=lambda line: line[:2])], left=(0, 1, 5))


def table(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table, the first its header; columns other than `left` are right-aligned."""
    rule = ["---" if column in left else "---:" for column in range(len(lines[0]))]
    return [f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])]


def figure(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Return a figure with its interval, "" without one."""
    return interval(row[name], form) if name in row else ""


def interval(found: Mapping[str, Any], form: str) -> str:
    """Return a value with its interval; the value alone where all images agree."""
    value, low, high = (format(found[name], form) for name in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def difference(row: Mapping[str, Any]) -> str:
    """Return what a method's images have in common with plain decoding's."""
    if row["promise"] == RELAXED:
        return f"TV {row['total_variation']['value']:.4f}"
    if row["promise"] != TOKENS:
        return "same distribution"
    differing = row.get("differing_images", 0)
    return f"other tokens in {differing} of {row['images']} images" if differing else "same tokens"
