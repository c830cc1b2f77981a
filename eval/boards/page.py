"""The generated rows of a document: between `<!-- rows: NAME -->` and `<!-- end rows -->`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern.core.config import read_json_object
from lantern.eval.boards.table import MOST, RELAXED, TOKENS, figures_of, interval, markdown_lines, speed_words
from lantern.methods import METHODS

ROWS = re.compile(r"(<!-- rows: (leaderboard|pairs) -->\n).*?(<!-- end rows -->)", re.S)
Board = Mapping[str, Any]


def results_of(path: Path) -> dict[str, Any]:
    """Return what a page shows of a file of results: of `lantern leaderboard`, or of the two commands before it."""
    found = read_json_object(path, most=MOST) if path.suffix == ".json" else {}
    if "contests" in found:
        boards = [one | {"rows": [earlier_row(row) for row in one["rows"][1:]]} for one in found["contests"]]
    elif "boards" not in found and "pairs" in found:
        rows = [{"method": pair["pair"][0], "against": [earlier_pair(pair)]} for pair in found["pairs"]]
        boards = [{"temperature": found["sampling"]["temperature"], "rows": rows}]
    else:
        return figures_of(path)
    return {"boards": boards, "failures": found.get("failures", [])}


def earlier_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an earlier leaderboard, whose first row is plain decoding's."""
    speed = row["speedup"]
    claim = speed["value"] if row["refusal"] is None else None
    fastest = {"ratio_of_medians": speed["value"], "interval_95": [speed["low"], speed["high"]], "claim": claim}
    return {**row, "over_fastest": fastest, "total_variation": row["quality"]["total-variation"], "against": []}


def earlier_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison of an earlier file of pairs; its verdicts are without Holm's correction."""
    words = [word.replace("per pass", "per step") for word in (pair["tokens"], pair["variation"]) if word]
    found = {"method": pair["pair"][1], "tokens_ratio": pair["tokens_ratio"], "variation": pair["variation_difference"]}
    return found | {"reason": pair["no_verdict"], "verdict": ", ".join(words) or "none"}


def rendered(text: str, found: Mapping[str, Any]) -> str:
    """Return the text of a document with the rows of these figures; tables that they do not hold are left as they are.

    ValueError if the document has no place for them.
    """
    if not ROWS.search(text):
        raise ValueError("the page has no line <!-- rows: leaderboard --> or <!-- rows: pairs -->: add one")
    tables = {"leaderboard": leaderboard_rows(found["boards"]), "pairs": pair_rows(found["boards"])}

    def filled(place: re.Match[str]) -> str:
        rows = tables[place[2]]
        return place[1] + "\n".join([*rows, place[3]]) if len(rows) > 2 else place[0]

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
    return markdown_lines(lines, left=(0, len(lines[0]) - 1))


def pair_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per pair and temperature, in the order of names."""
    lines = []
    for board in boards:
        for name, pair in ((row["method"], pair) for row in board["rows"] for pair in row["against"]):
            names = [name, pair["method"]]
            if all(re.split("[:@]", one)[0] in METHODS for one in names):
                moved = interval(pair["variation"], "+.3f") if "variation" in pair else ""
                ratio, at = figure(pair, "tokens_ratio"), f"{board['temperature']:g}"
                outcome = pair.get("reason") or pair["verdict"]
                lines.append([*(f"`{one}`" for one in names), at, ratio, moved, outcome])
    header = ["method", "against", "temperature", "tokens per step", "total variation", "verdict"]
    return markdown_lines([header, *sorted(lines, key=lambda line: line[:2])], left=(0, 1, 5))


def figure(row: Mapping[str, Any], name: str) -> str:
    """Return a rate with its interval, "" without one."""
    return interval(row[name]) if name in row else ""


def difference(row: Mapping[str, Any]) -> str:
    """Return what a method's images have in common with plain decoding's."""
    if row["promise"] == RELAXED:
        return f"TV {row['total_variation']['value']:.4f}"
    return "same tokens" if row["promise"] == TOKENS else "same distribution"
