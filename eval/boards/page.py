"""The generated rows of a document: between `<!-- rows: NAME -->` and `<!-- end rows -->`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern.eval.boards.table import RELAXED, TOKENS, interval, speed_words
from lantern.methods import METHODS

ROWS = re.compile(r"(<!-- rows: (leaderboard|pairs) -->\n).*?(<!-- end rows -->)", re.S)
Board = Mapping[str, Any]


def rendered(text: str, found: Mapping[str, Any]) -> str:
    """Return the text of a document with the rows of these figures; tables that they do not hold are left as they are.

    ValueError if the document has no place for them.
    """
    if not ROWS.search(text):
        raise ValueError("the page has no line <!-- rows: leaderboard --> or <!-- rows: pairs -->: add one")
    tables = {"leaderboard": leaderboard_rows(found["boards"]), "pairs": pair_rows(found["boards"])}

    def filled(place: re.Match[str]) -> str:
        rows = tables[place[2]]
        return place[1] + "".join(rows) + place[3] if len(rows) > 2 else place[0]

    return ROWS.sub(filled, text)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Write the rows into a document."""
    page.write_text(rendered(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def leaderboard_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per method at its own settings, those with the most tokens per step first."""
    of = [{row["method"]: row for row in board["rows"] if "over_fastest" in row} for board in boards]
    rates = ["tokens_per_step", *["foreground"] * any("foreground" in row for row in of[0].values())]
    words = {"tokens_per_step": "tokens per step", "foreground": "in the foreground"}
    columns = [f"{words[rate]}, temperature {board['temperature']:g}" for board in boards for rate in rates]
    lines = [["method", *columns, "nodes", "speed over plain", "difference"]]
    for row in sorted(of[0].values(), key=lambda row: -row["tokens_per_step"]["value"]):
        name = row["method"]
        if name in METHODS:
            cells = [figure(known.get(name, {}), rate) for known in of for rate in rates]
            nodes = f"{row['nodes_per_step']:.1f}" if "nodes_per_step" in row else ""
            lines.append([f"`{name}`", *cells, nodes, speed_words(row["over_fastest"], "*"), difference(row)])
    return table(lines, left=(0, len(lines[0]) - 1))


def pair_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per pair and temperature, in the order of names."""
    lines = []
    for board in boards:
        for row, pair in ((row, pair) for row in board["rows"] for pair in row["against"]):
            names = [row["method"], pair["method"]]
            if all(re.split("[:@]", name)[0] in METHODS for name in names):
                moved = interval(pair["variation"], "+.3f") if "variation" in pair else ""
                ratio, at = figure(pair, "tokens_ratio"), f"{board['temperature']:g}"
                outcome = pair.get("reason") or pair["verdict"]
                lines.append([*(f"`{name}`" for name in names), at, ratio, moved, outcome])
    header = ["method", "against", "temperature", "tokens per step", "total variation", "verdict"]
    return table([header, *sorted(lines, key=lambda line: line[:2])], left=(0, 1, 5))


def table(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table; the first is its header."""
    rule = ["---" if column in left else "---:" for column in range(len(lines[0]))]
    return ["| " + " | ".join(line) + " |\n" for line in (lines[0], rule, *lines[1:])]


def figure(row: Mapping[str, Any], name: str) -> str:
    """Return a rate with its interval, "" without one."""
    return interval(row[name]) if name in row else ""


def difference(row: Mapping[str, Any]) -> str:
    """Return what a method's images have in common with plain decoding's."""
    if row["promise"] == RELAXED:
        return f"TV {row['total_variation']['value']:.4f}"
    return "same tokens" if row["promise"] == TOKENS else "same distribution"
