"""`lantern reproduce`: makes and measures the images of a protocol; a stopped run resumes."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    FAILED,
    Command,
    add_engine,
    add_placement,
    check_folder,
    complain,
    existing,
    integer,
    named_path,
    placement_of,
    reporter,
)

if TYPE_CHECKING:
    from lantern.eval.protocols.generation import Shard
    from lantern.eval.protocols.reproduce import Row, Task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "protocol", help="coco2014-30k, coco2017-5k-longest, partiprompts, imagenet-50k, emoji, or a .json file of one;"
        " a row.json of an earlier run is repeated and compared",
    )  # fmt: skip
    _what(parser.add_argument_group("what"))
    _where(parser.add_argument_group("files"))
    _how(parser.add_argument_group("how"))


def _what(group: Any) -> None:
    add = group.add_argument
    add("--method", metavar="METHOD", help='such as eagle1 or "lantern++:k=5,lambda_=1.5"; default: the model\'s')
    add("--model", help="name, folder or hub id (default lantern-emoji)")
    add("--limit", type=integer(1, 10**7), metavar="N", help="only the first N images of the protocol")
    add("--metrics", nargs="*", metavar="NAME", help="default: the protocol's; without a name, none")


def _where(group: Any) -> None:
    add = group.add_argument
    add("--out", type=Path, metavar="FOLDER", help="default: runs/PROTOCOL/METHOD")
    add("--prompts", type=existing, metavar="FOLDER", help="folder of the protocol's prompt file")
    add("--reference", type=existing, metavar="PATH", help="real images or their statistics")
    add(
        "--weights",
        action="append",
        type=named_path(),
        default=[],
        metavar="NAME=PATH",
        help="weights of a metric's network; may be repeated",
    )


def _how(group: Any) -> None:
    add = group.add_argument
    add("--batch", type=integer(1, 4096), default=1, metavar="N", help="images at a time (default 1)")
    add_placement(group)
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add_engine(group, weights="--target-weights", default="eager")
    add("--shard", metavar="I/N", help="make only part I of N; torchrun and accelerate set it automatically")
    add("--ray", nargs="?", const="", metavar="ADDRESS", help="as a Ray job, on a cluster or here (extra: ray)")
    add("--actors", type=integer(1, 10_000), metavar="N", help="--ray: number of models; default one per GPU")
    add("--quiet", action="store_true", help="print only errors on stderr")


def run(args: argparse.Namespace) -> int:
    """Check, make, measure, write; return 1 if a metric failed or a repeated row differs."""
    from lantern.eval.protocols import reproduce
    from lantern.eval.protocols.reproduce import obstacles

    row = _row(args)
    check_folder(row.out)
    task = reproduce.prepare(row)
    say = reporter(args.quiet)
    for name, why in obstacles(task).items():
        say(f"{name} will not be measured: {why}")
    # the callback stops if a signal's exception was swallowed
    made = reproduce.make(task, shield=args.stopping.shield, callback=lambda step: args.stopping.check())
    entries = reproduce.complete(task)
    if entries is None:
        say(f"{made} images made; other shards are incomplete: when they are done, run the same without --shard")
        return DONE
    if row.shard is not None and row.shard.count > 1:
        say(f"{made} images made, all {len(entries)} are complete: run the same without --shard to measure them")
        return DONE
    return _report(task, reproduce.conclude(task, entries))


def _row(args: argparse.Namespace) -> "Row":
    from lantern.eval.protocols.reproduce import Row

    if args.actors is not None and args.ray is None:
        raise ValueError("--actors is an option of --ray, which is missing")
    folder = Path(args.protocol).stem if args.protocol.endswith(".json") else args.protocol
    slug = "".join(sign if sign.isalnum() or sign in "+-.=" else "-" for sign in args.method or "own")
    return Row(
        protocol=args.protocol,
        out=args.out or Path("runs") / folder / slug,
        method=args.method,
        model=args.model,
        limit=args.limit or 0,
        batch=args.batch,
        threads=args.threads,
        metrics=args.metrics,
        prompts=args.prompts,
        reference=args.reference,
        weights=dict(args.weights),
        shard=_shard(args),
        ray=args.ray,
        actors=args.actors,
        is_quiet=args.quiet,
        **placement_of(args, default="eager"),
    )


def _shard(args: argparse.Namespace) -> "Shard | None":
    """Return the shard of this process, by option or by its launcher."""
    from lantern.eval.protocols.generation import Shard

    launched = Shard.of_environment()
    if args.shard is None:
        return None if args.ray is not None else launched
    if args.ray is not None:
        raise ValueError("--ray distributes the work itself: leave --shard out")
    given = Shard.parse(args.shard)
    if launched is not None and launched != given:
        raise ValueError(
            f"--shard {args.shard}, but the launcher sets {launched.number}/{launched.count}: leave it out"
        )
    return given


def _report(task: "Task", row: dict[str, Any]) -> int:
    """Print the row and its errors; return the exit code."""
    from lantern.eval.protocols.reproduce import ROW_NAME, is_repeated

    speed = row["speed"]
    print(f"{task.protocol.name}, {row['choices']['method']}: {row['pictures']} images")
    cost = "" if speed["exact"] else f", total variation {speed['total_variation']:.3f} per token"
    print(f"  {speed['tokens_per_step']:.2f} tokens per step, {speed['seconds_per_picture']:.2f} s per image{cost}")
    for name, figure in row["metrics"].items():
        low_high = figure.get("interval")
        interval = f" [{low_high[0]:.4f}, {low_high[1]:.4f}]" if low_high else ""
        print(f"  {name} {figure['value']:.4f}{interval}{'; ' if figure['warning'] else ''}{figure['warning']}")
    print(f"  {task.folder / ROW_NAME}")
    repeated = is_repeated(task, row)
    if repeated is not None:
        print("  all images equal the repeated row's" if repeated else "  images differ from the repeated row's")
    if row["not_measured"]:
        complain("not measured: " + "; ".join(f"{name} ({why})" for name, why in row["not_measured"].items()))
    elif repeated is False:
        complain(f"the images differ from those of {task.row.protocol}: compare the fingerprints of both rows")
    return FAILED if row["not_measured"] or repeated is False else DONE


COMMAND = Command("reproduce", "Make a protocol's images, measure them, write the row.", add_arguments, run)
