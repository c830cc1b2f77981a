"""`lantern eval`: quality metrics of images, each with its interval, reference and warnings."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    Command,
    add_machine,
    check_file,
    existing,
    integer,
    named_path,
    set_threads,
)

if TYPE_CHECKING:
    from lantern.eval.metrics.quality import Figure

# a test compares both with the registry of lantern.eval
METRICS = (
    *("kid", "fid", "fid-legacy", "fid-torchmetrics", "precision", "recall", "density", "coverage", "is"),
    *("clip", "clip-lantern", "hps", "pickscore", "lpips", "psnr"),
)
WEIGHTS = ("inception", "inception-logits", "clip", "hps", "pickscore", "lpips")
MOMENTS = ".safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "pictures",
        nargs="+",
        type=existing,
        help="folders or files of images; or moments (.safetensors) of shards, which are merged",
    )
    add("--reference", type=existing, metavar="PATH", help="folder of real images, or their statistics")
    add("--metrics", nargs="+", metavar="METRIC", default=["kid", "fid"], help=f"metrics: {', '.join(METRICS)}")
    add("--prompts", metavar="FILE", help="one prompt per image in order of names; default: those in the files")
    weights = f"NAME of {', '.join(WEIGHTS)}"
    add("--weights", nargs="+", type=named_path(WEIGHTS), metavar="NAME=PATH", default=[], help=weights)
    add("--cache", type=Path, metavar="FOLDER", help="folder of weights (default: $LANTERN_CACHE)")
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of the bootstrap (default 0)")
    add(
        "--draws",
        type=integer(0, 10**5),
        default=1000,
        help="number of bootstrap samples, at most 100 for FID (default 1000)",
    )
    add("--batch", type=integer(1, 4096), default=32, help="images at a time (default 32)")
    add("--workers", type=integer(0, 1024), default=0, help="reading threads, 0 for as many as cores (default)")
    add("--keep-moments", type=Path, metavar="FOLDER", help="write Inception's moments there, to merge shards")
    add("--json", action="store_true", help="one JSON line on stdout, the table on stderr")
    add("--out", type=Path, metavar="FILE", help="write the figures to a JSON file as well")
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    if args.out is not None:
        check_file("--out", args.out)
    given = _by_name(args.weights)
    from lantern.core.io import write_json

    set_threads(args)
    figures = _of_moments(args) if args.pictures[0].suffix == MOMENTS else _of_pictures(args, given)
    print(render(figures), file=sys.stderr if args.json else sys.stdout)
    result = _result(args, figures)
    if args.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    if args.out is not None:
        write_json(args.out, result)
    return DONE


def render(figures: Mapping[str, "Figure"]) -> str:
    """Return the figures as a table, each warning below its figure."""
    lines = []
    for name, figure in figures.items():
        ends = "" if figure.interval is None else f"[{figure.interval[0]:.5g}, {figure.interval[1]:.5g}]"
        against = f" against {figure.reference_images} of {figure.reference}" if figure.reference else ""
        lines.append(f"{name:<17} {figure.value:>10.5g}  {ends:<22} {figure.images} images{against}".rstrip())
        if figure.warning:
            lines.append(f"{'':<17} warning: {figure.warning}")
    return "\n".join(lines)


def _of_pictures(args: argparse.Namespace, weights: Mapping[str, Path]) -> dict[str, "Figure"]:
    from lantern.eval.metrics.pictures import find_pictures
    from lantern.eval.metrics.quality import Options, measure
    from lantern.generation.requests import read_prompts
    from lantern.models.folder import pick_device

    options = Options(
        prompts_name=Path(args.prompts).name if args.prompts else "",
        cache=args.cache,
        draws=args.draws,
        batch=args.batch,
        workers=args.workers,
        device=pick_device(args.device),
        moments=args.keep_moments,
        is_quiet=args.quiet,
    )
    paths = [path for one in args.pictures for path in (find_pictures(one) if one.is_dir() else [one])]
    prompts = read_prompts(args.prompts) if args.prompts else None
    return measure(
        paths, args.reference, args.metrics, prompts=prompts, weights=weights, seed=args.seed, options=options
    )


def _of_moments(args: argparse.Namespace) -> dict[str, "Figure"]:
    from lantern.eval.metrics.quality import fid_of_shards

    others = [path for path in args.pictures if path.suffix != MOMENTS]
    if others:
        raise ValueError(f"{others[0]} is given together with moments, wanted only {MOMENTS} files")
    if args.reference is None:
        raise ValueError("moments need those of a reference: give them with --reference")
    figure = fid_of_shards(args.pictures, args.reference, seed=args.seed)
    return {figure.name: figure}


def _result(args: argparse.Namespace, figures: Mapping[str, "Figure"]) -> dict[str, Any]:
    from lantern.eval.speed.surroundings import surroundings
    from lantern.models.folder import pick_device

    return {
        "what": "eval",
        "figures": {name: figure.as_dict() for name, figure in figures.items()},
        "surroundings": surroundings(pick_device(args.device)),
    }


def _by_name(pairs: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--weights names {name} twice")
    return dict(pairs)


COMMAND = Command("eval", "Measure the quality of images.", add_arguments, run)
