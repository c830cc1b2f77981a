"""`lantern leaderboard`: measures every method on one model in one run, as figures, a table and a plot."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    FAILED,
    Command,
    add_board,
    add_judges,
    add_model,
    add_subject,
    board_options,
    check_board,
    check_folder,
    check_judges,
    check_results,
    complain,
    docs_of,
    existing,
    integer,
    judge_of,
    real,
    report,
    results_folder,
    run_command,
    set_threads,
)

if TYPE_CHECKING:
    from lantern.eval.boards.contest import LeaderboardOptions

NAME = "leaderboard"
FILES = (f"{NAME}.json", f"{NAME}.png", f"{NAME}.svg")
PAIRS, PAIRS_PAGE = "pairs.json", "pairs.md"
PICTURES = 64  # of each method of a pair
DISTRIBUTION = ("guidance", "top_k", "top_p")
TEMPERATURES, IMAGES = (1.0, 0.0), (8, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _what(parser.add_argument_group("what is measured"))
    add_judges(parser.add_argument_group("quality of relaxed methods beside total variation"))
    _how(parser.add_argument_group("how"))


def _what(group: Any) -> None:
    add = group.add_argument
    add(
        "--from",
        dest="results",
        type=existing,
        metavar="FILE",
        help="write the tables of a leaderboard.json, or with --pairs of a pairs.json",
    )
    add_model(group)
    add("--methods", nargs="+", metavar="METHOD", help='such as eagle1 "lantern:k=10,delta=0.1" (default: all)')
    add("--temperatures", nargs="+", type=real(0, 100), default=TEMPERATURES, metavar="T", help="default 1 0")
    add(
        "--images",
        nargs="+",
        type=integer(1, 10**5),
        metavar="N",
        help="images per method: one number, or one for each temperature (default 8 at the first, 4 at others; "
        f"for pairs {PICTURES}, at the first temperature)",
    )
    add(
        "--pairs",
        nargs="*",
        metavar="A==B",
        help="instead of the table: compare these pairs of methods by codes per pass and total variation, on the same "
        "images, in batches and without timing (default: those of the published methods), as pairs.json and pairs.md",
    )
    add(
        "--equal-budget",
        type=integer(0, 10**5),
        metavar="N",
        help="images of comparisons at equal budget, 0 for none (default 4, or all if fewer)",
    )
    add_subject(group, DISTRIBUTION)


def _how(group: Any) -> None:
    add_board(group, NAME, "leaderboard.json, .png and .svg")
    group.add_argument(
        "--docs",
        type=Path,
        help="folder of leaderboard.md and of methods/, whose marked rows are replaced (default docs, or --out)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, compute quality metrics, write; or only write. Return 1 if an exact method failed."""
    is_pairs = args.pairs is not None
    name, page, needed = ("pairs", PAIRS_PAGE, "pairs") if is_pairs else (NAME, "leaderboard.md", "contests")
    check_results(args, (PAIRS, PAIRS_PAGE) if is_pairs else FILES)
    from lantern.core.config import read_json_object
    from lantern.core.io import write_json
    from lantern.eval.boards.leaderboard_report import check_page

    out = args.out or (args.results.parent if args.results else results_folder())
    docs = args.docs or docs_of(out)
    check_folder(docs)
    if not args.overwrite:
        check_page(docs / page)
    if args.results is not None:
        figures = check_board(read_json_object(args.results), args.results, name, needed)
    else:
        figures = compared(args) if is_pairs else measured(args)
        write_json(out / f"{name}.json", figures)
        report(out / f"{name}.json", args.quiet)
    if is_pairs:
        publish_pairs(figures, docs, args.quiet)
        return DONE
    publish(figures, out, docs, args.quiet)
    for failure in figures["failures"]:
        complain(failure)
    return FAILED if figures["failures"] else DONE


def publish_pairs(figures: Mapping[str, Any], docs: Path, is_quiet: bool) -> None:
    """Write the page of pairs and the rows of methods, and print a line for each pair."""
    from lantern.core.io import atomic_write
    from lantern.eval.boards import pairs as board

    with atomic_write(docs / PAIRS_PAGE) as temporary:
        temporary.write_text(board.page(figures), encoding="utf-8")
    for path in (docs / PAIRS_PAGE, *board.write_pages(figures, docs)):
        report(path, is_quiet)
    for line in board.lines(figures):
        print(line)


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Measure pairs of methods and return the figures."""
    from lantern.eval.boards import pairs as board
    from lantern.eval.boards.contest import Setting

    chosen = [board.parse_pair(text) for text in args.pairs] or list(board.PAIRS)
    set_threads(args)
    images = (args.images or [PICTURES])[0]
    args.images, args.equal_budget, args.methods = None, 0, ["eagle1"]
    options = options_of(args)
    sampling = dict(options.sampling) | {"temperature": options.temperatures[0]}
    setting = Setting(dataclasses.replace(options, sampling=sampling))
    return board.Pairs(setting, chosen, images=images).measure()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the figures of a run."""
    options = options_of(args)
    least = check_judges(args, max(options.images))
    from lantern.eval.boards.leaderboard import Leaderboard

    set_threads(args)
    board = Leaderboard(options)
    judge = judge_of(args, board)
    board.measure()
    return board.figures(judge, least=least)


def options_of(args: argparse.Namespace) -> "LeaderboardOptions":
    """Return the options of the measurement."""
    from lantern.eval.boards.contest import LeaderboardOptions

    images = tuple(args.images or [IMAGES[0], *[IMAGES[1]] * (len(args.temperatures) - 1)])
    images = images * len(args.temperatures) if len(images) == 1 else images
    return LeaderboardOptions(
        specs=args.methods or (),
        temperatures=tuple(args.temperatures),
        images=images,
        equal_budget=min(4, images[0]) if args.equal_budget is None else args.equal_budget,
        **board_options(args, DISTRIBUTION),
    )


def publish(figures: Mapping[str, Any], out: Path, docs: Path, is_quiet: bool) -> None:
    """Write table, rows and plot."""
    from lantern.eval.boards import leaderboard_report

    written, unmarked = leaderboard_report.write_pages(figures, docs)
    for path in (*written, *leaderboard_report.save_plot(figures, out / NAME)):
        report(path, is_quiet)
    if unmarked and not is_quiet and (docs / "methods").is_dir():
        print(f"no page of docs/methods has a row for: {', '.join(unmarked)}", file=sys.stderr)


COMMAND = Command(NAME, "Measure every method in one run, as a table and a plot.", add_arguments, run)
main = partial(run_command, COMMAND, prog="python -m lantern.eval.boards.leaderboard")
