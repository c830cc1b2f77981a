"""`lantern bench`: measures the speedup of methods over the fastest plain decoding on this machine."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lantern.cli.command import (
    DISTRIBUTION,
    DONE,
    DTYPES,
    FAILED,
    VARIANT,
    Command,
    add_distribution,
    add_machine,
    add_model,
    check_file,
    complain,
    distribution_of,
    dtype_of_names,
    flag,
    integer,
    one_of,
    real,
    run_command,
    set_threads,
)
from lantern.methods import METHODS

SHAPES = ("B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B")
# options of only one of the two benchmarks
MODEL_ONLY = ("methods", "prompts_file", *DISTRIBUTION)
SHAPE_ONLY = ("tau", "tokens", "tree", "drafter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _model(parser.add_argument_group("a model (the default)"))
    _shape(parser.add_argument_group("a size of LlamaGen with random weights and simulated acceptance"))
    _both(parser.add_argument_group("how"))


def _model(group: Any) -> None:
    add = group.add_argument
    add_model(group)
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help='such as eagle1 "lantern++:k=5,lambda_=1.5"; default: auto and the model\'s default',
    )
    add("--prompts-file", metavar="FILE", help="prompts, one per line (or .json, .jsonl, .tsv)")
    add_distribution(group)


def _shape(group: Any) -> None:
    add = group.add_argument
    add("--shape", nargs="+", type=one_of(SHAPES), metavar="SIZE", help=f"of {', '.join(SHAPES)}")
    add("--tau", nargs="+", type=real(1, 64), help="tokens per step to simulate (default 2 3 3.5 4)")
    add("--tokens", type=integer(1, 65535), help="tokens of the canvas to decode (default 48)")
    add("--tree", metavar="NAME", help="draft tree (default grown_15_4)")
    add(
        "--drafter",
        type=one_of(list(METHODS)),
        help="method whose drafter is measured, such as eagle1 (one pass per depth) or parallelspec (one pass for all "
        "depths) (default eagle1)",
    )


def _both(group: Any) -> None:
    add = group.add_argument
    add("--images", type=integer(1, 10**5), default=10, help="images of each contender (default 10)")
    add("--batch", nargs="+", type=integer(1, 4096), default=[1], help="images at a time (default 1)")
    add("--dtype", nargs="+", type=dtype_of_names(), help=f"of {', '.join(DTYPES)} (default fp32 bf16; sizes: bf16)")
    add(
        "--variants",
        nargs="+",
        type=VARIANT,
        help="how methods run, of eager, cpu, graph, each also +int8 (default all that the device has)",
    )
    add(
        "--baseline",
        nargs="+",
        type=VARIANT,
        help="how plain decoding runs beside --variants; the fastest is the baseline (default all that the device has)",
    )
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of the noise (default 0)")
    add("--json", action="store_true", help="one JSON line on stdout, the table on stderr")
    add("--out", type=Path, metavar="FILE", help="write the JSON line to a file as well")
    add_machine(group)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; return 1 if an exact method did not give plain decoding's tokens."""
    _check(args)
    from lantern.eval.speed.bench import render

    set_threads(args)
    found = [measure() for measure in (_of_shapes(args) if args.shape else [_of_model(args)])]
    figures = found[0] if len(found) == 1 else {"what": "shapes", "shapes": found}
    print("\n\n".join(map(render, found)), file=sys.stderr if args.json else sys.stdout)
    line = json.dumps(figures, ensure_ascii=False, allow_nan=False)
    if args.json:
        print(line)
    if args.out is not None:
        from lantern.core.io import atomic_write

        with atomic_write(args.out) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
    broken = [text for one in found for text in one.get("failures", ())]
    if broken:
        complain("; ".join(broken))
    return FAILED if broken else DONE


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options of the benchmark that is not run."""
    for name in MODEL_ONLY if args.shape else SHAPE_ONLY:
        if getattr(args, name) is not None:
            other = "a model, not of --shape" if args.shape else "--shape, which is missing"
            raise ValueError(f"{flag(name)} is an option of {other}")
    if args.out is not None:
        check_file("--out", args.out)


def _of_model(args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from lantern.eval.speed.bench import BenchOptions, measure

    given: dict[str, Any] = {"methods": args.methods, "dtypes": args.dtype, **_kinds(args)}
    if args.prompts_file is not None:
        from lantern.generation.requests import read_prompts

        given["prompts"] = read_prompts(args.prompts_file)
    options = BenchOptions(
        model=args.model,
        images=args.images,
        batches=args.batch,
        sampling=distribution_of(args),
        seed=args.seed,
        device=args.device,
        is_quiet=args.quiet,
        **{name: value for name, value in given.items() if value},
    )
    return lambda: measure(options)


def _kinds(args: argparse.Namespace) -> dict[str, Any]:
    """Return how methods and plain decoding run; plain decoding in every way unless --baseline restricts it."""
    from lantern.eval.speed.contenders import kinds_of
    from lantern.models.folder import pick_device

    return {"kinds": args.variants, "baselines": args.baseline or kinds_of(pick_device(args.device))}


def _of_shapes(args: argparse.Namespace) -> list[Callable[[], dict[str, Any]]]:
    from lantern.eval.speed.shapes import ShapeOptions, measure

    given = {"taus": args.tau, "tokens": args.tokens, "tree": args.tree, "drafter": args.drafter}
    given |= {"dtypes": args.dtype, **_kinds(args)}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value}
    chosen |= {"images": args.images, "device": args.device, "is_quiet": args.quiet}
    return [
        lambda shape=shape, batch=batch: measure(ShapeOptions(shape=shape, batch=batch, **chosen))
        for shape in args.shape
        for batch in args.batch
    ]


COMMAND = Command("bench", "Measure the speedup of methods over the fastest plain decoding.", add_arguments, run)
main = partial(run_command, COMMAND)
