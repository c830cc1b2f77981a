"""`lantern frontier`: speedup against cost in quality over the settings of methods, as plots and a page."""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lantern.cli.command import (
    DONE,
    Command,
    add_board,
    add_judges,
    add_model,
    add_subject,
    board_options,
    check_board,
    check_judges,
    check_results,
    docs_of,
    existing,
    integer,
    judge_of,
    report,
    results_folder,
    run_command,
    set_threads,
)

NAME = "frontier"
RULES = "rules"  # name of the files of --rules
MOST_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _what(parser.add_argument_group("what is measured"))
    add_judges(parser.add_argument_group("quality beside total variation"))
    add_board(parser.add_argument_group("how"), NAME, "frontier.json, .png, .svg and .html")


def _what(group: Any) -> None:
    add = group.add_argument
    add("--from", dest="results", type=existing, metavar="FILE", help="draw an existing frontier.json")
    add_model(group)
    add(
        "--points",
        nargs="+",
        metavar="METHOD",
        help='such as eagle1 "lantern:k=10/100,delta=0.1/0.2", which is four points; default: 13 points',
    )
    add(
        "--rules",
        action="store_true",
        help="one curve of step compression against quality per relaxed rule, as rules.json, .png, .svg and .html; "
        "default points: ten rules at three or four strengths",
    )
    add("--images", type=integer(1, 10**5), default=24, help="images per point (default 24)")
    add("--shown", type=integer(0, MOST_SHOWN), default=4, help="images of a point in the report (default 4)")
    add_subject(group)


def run(args: argparse.Namespace) -> int:
    """Measure missing points, compute quality metrics, write and draw; or only draw."""
    name = RULES if args.rules else NAME if args.results is None else args.results.stem
    endings = ("json", "png", "svg", "html", *(["md"] if args.rules else []))
    check_results(args, [f"{name}.{ending}" for ending in endings])
    from lantern.core.config import read_json_object

    if args.results is not None:
        figures = check_board(read_json_object(args.results), args.results, NAME, "points")
        draw(figures, (args.out or args.results.parent) / name, args.quiet)
        return DONE
    check_judges(args, args.images)
    from lantern.eval.boards.frontier import RULES as RULE_POINTS
    from lantern.eval.boards.frontier import FrontierOptions, Sweep

    set_threads(args)
    points = args.points or (RULE_POINTS if args.rules else None)
    given: dict[str, Any] = board_options(args) | ({"specs": points} if points else {})
    sweep = Sweep(FrontierOptions(leaves_out=not args.points, images=args.images, shown=args.shown, **given))
    for spec, command in sweep.left_out.items():
        print(f"left out {spec}: the model lacks an add-on, which is trained by: {command}", file=sys.stderr)
    judge = judge_of(args, sweep)
    figures = sweep.figures(sweep.measure(), judge) | ({"are_rules": True} if args.rules else {})
    from lantern.core.io import write_json

    out = args.out or results_folder()
    write_json(out / f"{name}.json", figures)
    report(out / f"{name}.json", args.quiet)
    draw(figures, out / name, args.quiet)
    return DONE


def draw(figures: Mapping[str, Any], stem: Path, is_quiet: bool) -> None:
    """Write plots and page as `stem`.png, .svg and .html, and the table of rules as rules.md."""
    from lantern.eval.boards import frontier_report

    png, svg = frontier_report.save_plot(figures, stem)
    made = [png, svg, frontier_report.save_page(figures, svg, stem.with_suffix(".html"))]
    if figures.get("are_rules"):
        made.append(frontier_report.save_rules(figures, png, docs_of(stem.parent) / f"{RULES}.md"))
    for path in made:
        report(path, is_quiet)


COMMAND = Command(NAME, "Draw speedup against quality over the settings of methods.", add_arguments, run)
main = partial(run_command, COMMAND, prog="python -m lantern.eval.boards.frontier")
