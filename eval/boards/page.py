"""The generated rows of a document: between `<!-- rows: NAME -->` and `<!-- end rows -->`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern.eval.boards.table import RELAXED, TOKENS, interval

ROWS = re.compile(r"(<!-- rows: (leaderboard|pairs) -->\n).*?(<!-- end rows -->)", re.S)
Board = Mapping[str, Any]


def rendered(text: str, found: Mapping[str, Any]) -> str:
    """Return the text of a document with the rows of these figures; ValueError if it has no place for them."""
    if not ROWS.search(text):
        raise ValueError("the page has no line <!-- rows: leaderboard --> or <!-- rows: pairs -->: add one")
    tables = {"leaderboard": leaderboard_rows, "pairs": pair_rows}
    return ROWS.sub(lambda place: place[1] + "".join(tables[place[2]](found["boards"])) + place[3], text)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Write the rows into a document."""
    page.write_text(rendered(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def leaderboard_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per method at its own settings, those with the most tokens per step first."""
    columns = [
        f"{word}, temperature {one['temperature']:g}" for one in boards for word in ("tokens per step", "foreground")
    ]
    of = [{row["method"]: row for row in board["rows"] if "reason" not in row} for board in boards]
    first = sorted(of[0].values(), key=lambda row: -row["tokens_per_step"]["value"])
    lines = [["method", *columns, "nodes", "speed", "difference"]]
    for row in (row for row in first if ":" not in row["method"]):
        rates = [known[row["method"]] for known in of if row["method"] in known]
        cells = [figure(one, name) for one in rates for name in ("tokens_per_step", "foreground")]
        nodes = f"{row['nodes_per_step']:.1f}" if row.get("nodes_per_step") else ""
        lines.append([f"`{row['method']}`", *cells, nodes, speed(row["over_fastest"]), difference(row)])
    return table(lines, left=(0, len(lines[0]) - 1))


def pair_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per pair and temperature, in the order of names."""
    found = [
        [
            f"`{row['method']}`",
            f"`{pair['method']}`",
            f"{board['temperature']:g}",
            ratio(pair),
            variation(pair),
            outcome(pair),
        ]
        for board in boards
        for row in board["rows"]
        for pair in row["against"]
    ]
    header = ["method", "against", "temperature", "tokens per step", "total variation", "verdict"]
    return table([header, *sorted(found, key=lambda line: line[:2])], left=(0, 1, 5))


def table(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table; the first is its header."""
    rule = ["---" if column in left else "---:" for column in range(len(lines[0]))]
    return ["| " + " | ".join(line) + " |\n" for line in (lines[0], rule, *lines[1:])]


def figure(row: Mapping[str, Any], name: str) -> str:
    """Return a rate with its interval, "" without one."""
    return interval(row[name]) if name in row else ""


def speed(found: Mapping[str, Any]) -> str:
    """Return the speedup with its interval; * marks what is no claim."""
    low, high = found["interval_95"]
    return f"{found['ratio_of_medians']:.2f} ({low:.2f} to {high:.2f}){'' if found['claim'] is not None else '*'}"


def difference(row: Mapping[str, Any]) -> str:
    """Return what a method's images have in common with plain decoding's."""
    if row["promise"] == RELAXED:
        return f"TV {row['total_variation']['value']:.4f}"
    return "same tokens" if row["promise"] == TOKENS else "same distribution"


def ratio(pair: Mapping[str, Any]) -> str:
    """Return the ratio of tokens per step."""
    return interval(pair["tokens_ratio"]) if "tokens_ratio" in pair else ""


def variation(pair: Mapping[str, Any]) -> str:
    """Return the difference in total variation."""
    return interval(pair["variation"], "+.3f") if "variation" in pair else ""


def outcome(pair: Mapping[str, Any]) -> str:
    """Return the verdict, or why there is none."""
    return pair["reason"] if "reason" in pair else pair["verdict"]
