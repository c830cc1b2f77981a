"""The tables of a board in Markdown: printed, or the rows of a document.

Rows of a document stand between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern.eval.boards.table import RELAXED, TOKENS
from lantern.eval.speed.surroundings import short_commit
from lantern.methods import METHODS

ROWS = re.compile(r"(<!-- rows: (leaderboard|pairs) -->\n).*?(<!-- end rows -->)", re.S)
Board = Mapping[str, Any]


def rendered(text: str, found: Mapping[str, Any]) -> str:
    """Return the text of a document with the rows of these figures; tables that they do not hold are left as they are.

    ValueError if the document has no place for them.
    """
    if not ROWS.search(text):
        raise ValueError("the page has no line <!-- rows: leaderboard --> or <!-- rows: pairs -->: add one")
    # a document lists methods at their own settings that exist still
    listed = [[row for row in board["rows"] if row["method"] in METHODS] for board in found["boards"]]
    boards = [board | {"rows": rows} for board, rows in zip(found["boards"], listed, strict=True)]
    tables = {"leaderboard": leaderboard_rows(boards), "pairs": pair_rows(found["boards"])}

    def filled(place: re.Match[str]) -> str:
        rows = tables[place[2]]
        return place[1] + "\n".join([*rows, place[3]]) if len(rows) > 2 else place[0]

    return ROWS.sub(filled, text)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Write the rows into a document."""
    page.write_text(rendered(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def markdown(found: Mapping[str, Any]) -> str:
    """Return the tables of each temperature, with a line that states what was measured with, and those of pairs."""
    lines = [line for board in found["boards"] for line in board_lines(found, board)]
    pairs = pair_rows(found["boards"])
    return "\n".join([*lines, *(pairs if len(pairs) > 2 else ())])


def board_lines(found: Mapping[str, Any], board: Board) -> Iterator[str]:
    """Yield the lines of one temperature."""
    where, loads = found["surroundings"], sorted(board["load"]) or [math.nan]
    yield (
        f"Model {found['model']} ({found['weights'][:12]}), {found['variant']}, seed {found['seed']}, guidance "
        f"{found['sampling']['guidance']:g}, temperature {board['temperature']:g}, {board['images']} images; "
        f"{where['gpu'] or where['cpu']}, {where['threads']} threads, load {loads[0]:.1f} to {loads[-1]:.1f}; torch "
        f"{where['torch']}, commit {', '.join(map(short_commit, found['commits']))}. The fastest plain decoding "
        f"is {board['baseline'].partition(' | ')[2]}. Brackets: 95 % intervals, paired by seed. *: no claim: fewer "
        "than 10 images, times that vary too much, or an interval that contains 1."
    )
    yield from ("", *leaderboard_rows([board]), "")
    yield from (f"- `{row['method']}` not measured: {row['reason']}" for row in board["rows"] if "reason" in row)
    if any(row.get("changes") for row in board["rows"]):
        yield "Change of metrics from plain decoding; ! marks what chance does not explain."
    for row in board["rows"]:
        for name, one in row.get("changes", {}).items():
            yield f"- `{row['method']}`: {name} {interval(one, '+.4f')}{'' if one['is_within'] else ' !'}"


def leaderboard_rows(boards: Sequence[Board]) -> list[str]:
    """Return one line per measured method, those with the most tokens per step first."""
    of = [{row["method"]: row for row in board["rows"] if "over_fastest" in row} for board in boards]
    rates = ["tokens_per_step", *["foreground"] * any("foreground" in row for row in of[0].values())]
    words = {"tokens_per_step": "tokens per step", "foreground": "in the foreground"}
    columns = [f"{words[rate]}, temperature {board['temperature']:g}" for board in boards for rate in rates]
    lines = [["method", *columns, "nodes", "speed over plain", "difference"]]
    for name, row in sorted(of[0].items(), key=lambda one: -one[1]["tokens_per_step"]["value"]):
        cells = [figure(known.get(name, {}), rate) for known in of for rate in rates]
        nodes = f"{row['nodes_per_step']:.1f}" if "nodes_per_step" in row else ""
        lines.append([f"`{name}`", *cells, nodes, speed(row["over_fastest"]), difference(row)])
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


def speed(ratio: Mapping[str, Any]) -> str:
    """Return a speedup with its interval by rounds, marked if it is no claim."""
    low, high = ratio["interval_95"]
    return f"{ratio['ratio_of_medians']:.2f} ({low:.2f} to {high:.2f}){'' if ratio['claim'] is not None else '*'}"


def difference(row: Mapping[str, Any]) -> str:
    """Return what a method's images have in common with plain decoding's."""
    if row["promise"] == RELAXED:
        return f"TV {row['total_variation']['value']:.4f}"
    if row["promise"] != TOKENS:
        return "same distribution"
    differing = row.get("differing_images", 0)
    return f"other tokens in {differing} of {row['images']} images" if differing else "same tokens"
