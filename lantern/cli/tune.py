"""`lantern tune`: measures this machine and writes the fastest method to a profile that method "auto" reads."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    SAMPLING,
    Command,
    add_distribution,
    add_engine,
    add_model,
    add_placement,
    check_file,
    distribution_of,
    existing,
    integer,
    placement_of,
    real,
    reporter,
)

if TYPE_CHECKING:
    from lantern.generation.tuning.tuner import Candidate, Findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    what = parser.add_argument_group("what to measure")
    add_model(what)
    what.add_argument("--prompts-file", metavar="FILE", help="prompts to measure on (default: eight simple ones)")
    what.add_argument("--images", type=integer(1, 10_000), default=4, metavar="N", help="images to count acceptance on")
    what.add_argument("--batch", type=integer(1, 4096), default=1, metavar="N", help="images at a time (default 1)")
    what.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of these images (default 0)")
    add_placement(what)
    add_engine(what)
    _bounds(parser.add_argument_group("what may be chosen (exact methods unless a bound is given)"))
    add_distribution(parser.add_argument_group("the distribution that tokens are sampled from"), tuple(SAMPLING))
    results = parser.add_argument_group("results")
    results.add_argument(
        "--out", type=Path, metavar="FILE", help="the profile (default: beside the model, where `auto` finds it)"
    )
    results.add_argument(
        "--write-model",
        action="store_true",
        help="also write the tokens per step of windows into the model's folder; `auto` reads them on every machine",
    )
    results.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")
    results.add_argument("--quiet", action="store_true", help="print only errors on stderr")


def _bounds(group: Any) -> None:
    add = group.add_argument
    add(
        "--max-tv", type=real(0, 1), metavar="X", help="admit relaxed methods up to this mean total variation per token"
    )
    add("--max-kid", type=real(0, 10), metavar="X", help="admit relaxed methods up to this loss in KID")
    add(
        "--quality",
        type=existing,
        metavar="FILE",
        help='KID losses by method and setting: {"lantern++": {"2.0": 0.0004}}',
    )
    add(
        "--max-nodes",
        type=integer(2, 256),
        default=32,
        metavar="N",
        help="most nodes of a pass, root included (default 32)",
    )
    add("--max-depth", type=integer(1, 16), default=8, metavar="N", help="greatest depth of a tree (default 8)")
    add("--methods", nargs="+", default=[], metavar="NAME", help="measure only these, and plain decoding")


def run(args: argparse.Namespace) -> int:
    """Check the arguments, load the model, measure, write the profile and print it.

    ValueError for prompts to a model of classes.
    """
    from lantern.core.config import read_json_object
    from lantern.generation.tuning.candidates import Bounds

    if args.out is not None:
        check_file("--out", args.out)
    bounds = Bounds(args.max_tv, args.max_kid, read_json_object(args.quality) if args.quality else {})
    from lantern.generation.requests import read_prompts
    from lantern.generation.tuning.tuner import tune
    from lantern.models.folder import load_model

    parts: set[Any] = {"text", "drafter", "neighbours"} | ({"vq"} if bounds.admits_relaxed else set())
    model = load_model(args.model, parts=parts, **placement_of(args))
    if args.prompts_file is not None and not model.takes_prompts:
        raise ValueError(f"model {model.name} takes class labels, not prompts: leave --prompts-file out")
    found, profile, path = tune(
        model,
        sampling=model.sampling(**distribution_of(args, tuple(SAMPLING))),
        prompts=() if args.prompts_file is None else read_prompts(args.prompts_file),
        images=args.images,
        batch=args.batch,
        seed=args.seed,
        bounds=bounds,
        methods=args.methods,
        max_nodes=args.max_nodes,
        max_depth=args.max_depth,
        out=args.out,
        writes_model=args.write_model,
        report=reporter(args.quiet, "measuring"),
    )
    if args.json:
        print(json.dumps(profile | {"path": str(path)}, sort_keys=True))
    else:
        print("\n".join([*table(found), f"profile: {path}"]))
    return DONE


def table(found: "Findings") -> list[str]:
    """Return the candidates with predicted and measured figures as lines of a table; the chosen one is marked.

    The candidates are the ten best ones, and those with a real run.
    """
    shown = [one for i, one in enumerate(found.candidates) if i < 10 or one.run is not None]
    rows = [("", "method", "tokens/step", "ms/token", "speedup", "measured", "total variation")]
    rows += [_row(found, candidate) for candidate in [found.plain, *shown]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [row[i].ljust(widths[i]) for i in (0, 1)]
        right = [row[i].rjust(widths[i]) for i in range(2, len(row))]
        lines.append("  ".join([*left, *right]).rstrip())
    if "tree" in found.choice.settings:
        lines.append(f"tree: {found.choice.settings['tree']}")
    return lines


def _row(found: "Findings", candidate: "Candidate") -> tuple[str, ...]:
    reported = candidate.as_dict(found.plain)
    predicted, measured = reported["predicted"], reported["measured"]
    return (
        "*" if candidate == found.choice else "",
        candidate.label,
        f"{predicted['tokens_per_step']:.2f}",
        f"{predicted['milliseconds_per_token']:.2f}",
        f"{predicted['speedup']:.2f}x",
        "-" if measured is None else f"{measured['speedup']:.2f}x",
        f"{(measured or predicted)['total_variation']:.3f}",
    )


COMMAND = Command("tune", "Measure this machine and find the fastest method for --method auto.", add_arguments, run)
