"""`lantern leaderboard`: methods on one model in one run, as JSON lines and a table."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    DTYPES,
    FAILED,
    VARIANT,
    Command,
    add_distribution,
    add_engine,
    add_machine,
    add_model,
    check_file,
    complain,
    distribution_of,
    engine_of,
    existing,
    integer,
    named_path,
    one_of,
    set_threads,
)

if TYPE_CHECKING:
    from lantern.eval.boards.board import BoardOptions, Judging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _what(parser.add_argument_group("what is measured"))
    _quality(parser.add_argument_group("quality of relaxed methods beside total variation, as `lantern eval` measures"))
    _how(parser.add_argument_group("how"))


def _what(group: Any) -> None:
    add = group.add_argument
    add("--from", dest="results", type=existing, metavar="FILE", help="print the table of a file; nothing is measured")
    add_model(group)
    add("--methods", nargs="+", metavar="METHOD", help='such as eagle1 "lantern:k=10/100,delta=0.1" (default: all)')
    add(
        "--pairs",
        nargs="*",
        metavar="A==B",
        help="compare these methods, paired by seed (default: each published method with what its paper compares with)",
    )
    add("--rules", action="store_true", help="each relaxed rule at several strengths, on the same tree or window")
    add("--images", type=integer(1, 10**5), default=8, help="images per method (default 8)")
    add("--batch", type=integer(1, 4096), default=1, help="images at a time (default 1)")
    add("--prompts-file", metavar="FILE", help="prompts, one per line (default assets/prompts/concepts.txt)")
    add_distribution(group)
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of noise and order of prompts (default 0)")


def _quality(group: Any) -> None:
    add = group.add_argument
    add("--metrics", nargs="+", metavar="NAME", help="such as kid clip")
    add("--reference", type=existing, metavar="PATH", help="real images or their statistics")
    add(
        "--weights",
        nargs="+",
        type=named_path(kind=existing),
        metavar="NAME=PATH",
        default=[],
        help="such as clip=FOLDER",
    )


def _how(group: Any) -> None:
    add = group.add_argument
    add_engine(group, weights="--target-weights")
    add("--dtype", type=one_of(DTYPES), default="fp32", help="dtype of methods: fp32 (default), bf16 or fp16")
    add(
        "--baseline",
        nargs="+",
        type=VARIANT,
        default=(),
        help="how plain decoding runs beside the methods' engine; the fastest is the baseline (default: all there are)",
    )
    add("--out", type=Path, metavar="FILE", default=Path("runs/leaderboard.jsonl"),
        help="file of JSON lines, which a stopped or longer run extends (default runs/leaderboard.jsonl)")  # fmt: skip
    add("--json", action="store_true", help="print the figures of the table as one JSON line")
    add_machine(group)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, print the table. Return 1 if an exact method failed; ValueError for another file."""
    from lantern.eval.boards.table import figures, markdown
    from lantern.eval.json_lines import read_lines

    path = args.results or args.out
    if args.results is None:
        if args.metrics is None and (args.reference or args.weights):
            raise ValueError("--reference and --weights are options of --metrics, which is missing")
        if path.parent.is_dir():
            check_file("--out", path)
        _measure(args)
    header, lines = read_lines(path)
    if header.get("what") != "leaderboard":
        raise ValueError(f"{path} holds no leaderboard: give a file that `lantern leaderboard` wrote")
    found = figures(header, lines)
    print(json.dumps(found, ensure_ascii=False) if args.json else markdown(header, found))
    for failure in found["failures"]:
        complain(failure)
    return FAILED if found["failures"] else DONE


def _measure(args: argparse.Namespace) -> None:
    from lantern.eval.boards.board import Board

    set_threads(args)
    options, judging = _options(args), _judging(args)
    board = Board(options)
    board.measure()
    if judging is not None:
        board.judge(judging)


def _options(args: argparse.Namespace) -> "BoardOptions":
    from lantern.eval.boards.board import PAIRS, RULES, BoardOptions, parse_pair
    from lantern.eval.speed.contenders import Variant

    pairs = () if args.pairs is None else tuple(map(parse_pair, args.pairs)) or PAIRS
    return BoardOptions(
        out=args.out,
        prompts=shuffled_prompts(args.prompts_file, args.seed),
        methods=(*(args.methods or ()), *(RULES if args.rules else ())),
        pairs=pairs,
        images=args.images,
        batch=args.batch,
        model=args.model,
        variant=Variant.of(engine_of(args), args.dtype),
        baselines=tuple(args.baseline),
        baseline_dtypes=("fp32", "bf16") if args.dtype != "fp16" else ("fp32", "fp16"),
        sampling=distribution_of(args),
        seed=args.seed,
        device=args.device,
        is_quiet=args.quiet,
    )


def _judging(args: argparse.Namespace) -> "Judging | None":
    if args.metrics is None:
        return None
    from lantern.eval.boards.board import Judging
    from lantern.eval.metrics.quality import in_order

    in_order(args.metrics, images=args.images)  # rejects unknown ones
    return Judging(args.metrics, args.reference, dict(args.weights))


def shuffled_prompts(file: str | None, seed: int) -> list[str]:
    """Return the prompts of a file in an order given by the seed, so that a longer run extends a shorter one."""
    import torch

    from lantern.core.places import shipped_folder
    from lantern.generation.requests import read_prompts

    path = file or shipped_folder("assets", "prompts") / "concepts.txt"
    prompts = read_prompts(str(path))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed % 2**32))
    return [prompts[i] for i in order.tolist()]


COMMAND = Command("leaderboard", "Measure methods in one run, as JSON lines and a table.", add_arguments, run)
