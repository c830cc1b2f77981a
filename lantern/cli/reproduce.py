"""`lantern reproduce`: makes and measures the images of a protocol; a stopped run resumes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, FAILED, Group, arg, check_folder, command, complain, existing, named, opt, say
from lantern.cli.eval import WEIGHTS
from lantern.cli.options import Apart

if TYPE_CHECKING:
    from lantern.core.process import Stopping
    from lantern.eval.protocols.generation import Shard
    from lantern.eval.protocols.reproduce import ResolvedRow

PROTOCOLS = "coco2014-30k, coco2017-5k-longest, partiprompts, imagenet-50k, emoji"
PROTOCOL_HELP = f"{PROTOCOLS}, or a .json file of one; a row.json is repeated with its own choices and compared"
METHOD_HELP = 'such as eagle1 or "lantern++:k=5,lambda_=1.5"; default: the model\'s'
METRICS_HELP = "default: the protocol's; without a name, none"
SHARD_HELP = "make only part I of N; torchrun and accelerate set it automatically"
RAY_HELP = "as a Ray job, on a cluster or here (extra: ray)"
WEIGHTS_HELP = "weights of a metric's network; may be repeated"


class Choices(Group):
    """What is made and measured."""

    method: str | None = opt(None, METHOD_HELP, metavar="METHOD")
    model: str | None = opt(None, "name, folder or hub id (default lantern-emoji)")
    limit: int = opt(0, "only the first N images of the protocol", 1, 10**7)
    metrics: list[str] | None = opt(None, METRICS_HELP, nargs="*")
    batch: int = opt(0, "images at a time (default 1)", 1, 4096)
    threads: int | None = opt(None, "CPU threads to compute on", 1, 1024)
    prompts: Path | None = opt(None, "folder of the protocol's prompt file", type=existing, metavar="FOLDER")
    reference: Path | None = opt(None, "real images or their statistics", type=existing)
    ray: str | None = opt(None, RAY_HELP, metavar="ADDRESS", nargs="?", const="")
    actors: int | None = opt(None, "--ray: number of models; default one per GPU", 1, 10_000)


def reproduce(
    protocol: str = arg(PROTOCOL_HELP),
    out: Path | None = opt(None, "default: runs/PROTOCOL/METHOD", metavar="FOLDER"),
    shard: str | None = opt(None, SHARD_HELP, metavar="I/N"),
    weights: list[tuple[str, Path]] = opt(
        [], WEIGHTS_HELP, type=named(Path, names=WEIGHTS), metavar="NAME=PATH", action="append"
    ),
    quiet: bool = opt(False, "print only errors on stderr"),
    *,
    choices: Choices,
    where: Apart,
    stopping: "Stopping",
) -> int:
    """Make a protocol's images, measure them, write the row."""
    from lantern.eval.protocols import reproduce as protocols

    if choices.actors and choices.ray is None:
        raise ValueError("--actors is an option of --ray, which is missing")
    folder = Path(protocol).stem if protocol.endswith(".json") else protocol
    slug = "".join(sign if sign.isalnum() or sign in "+-.=" else "-" for sign in choices.method or "own")
    row = protocols.TableRow(
        protocol=protocol,
        out=out or Path("runs") / folder / slug,
        weights=dict(weights),
        shard=_shard(shard, has_ray=choices.ray is not None),
        is_quiet=quiet,
        **vars(choices),
        **where.options(),
    )
    check_folder(row.out)
    task = protocols.prepare(row)
    for name, why in protocols.obstacles(task).items():
        say(f"{name} will not be measured: {why}", quiet)
    # the callback stops if a signal's exception was swallowed
    made = protocols.make(task, shield=stopping.shield, callback=lambda step: stopping.check())
    entries = protocols.complete(task)
    if entries is None:
        say(f"{made} images made; other shards are incomplete: when they are done, run the same without --shard", quiet)
        return DONE
    if row.shard is not None and row.shard.count > 1:
        complete = f"all {len(entries)} are complete: run the same without --shard to measure them"
        say(f"{made} images made, {complete}", quiet)
        return DONE
    return _report(task, protocols.conclude(task, entries))


def _shard(text: str | None, *, has_ray: bool) -> "Shard | None":
    """Return the shard of this process, by option or by its launcher."""
    from lantern.eval.protocols.generation import Shard

    launched = Shard.of_environment()
    if text is None:
        return None if has_ray else launched
    if has_ray:
        raise ValueError("--ray distributes the work itself: leave --shard out")
    given = Shard.parse(text)
    if launched is not None and launched != given:
        raise ValueError(f"--shard {text}, but the launcher sets {launched.number}/{launched.count}: leave it out")
    return given


def _report(task: "ResolvedRow", row: dict[str, Any]) -> int:
    """Print the row and its errors; return the exit code."""
    from lantern.eval.protocols.reproduce import ROW_NAME, is_repeated

    speed = row["speed"]
    print(f"{task.protocol.name}, {row['choices']['method']}: {row['pictures']} images")
    cost = "" if speed["exact"] else f", total variation {speed['total_variation']:.3f} per token"
    print(f"  {speed['tokens_per_step']:.2f} tokens per step, {speed['seconds_per_picture']:.2f} s per image{cost}")
    for name, figure in row["metrics"].items():
        low_high = figure.get("interval")
        interval = f" [{low_high[0]:.4f}, {low_high[1]:.4f}]" if low_high else ""
        value = "inf" if figure["value"] is None else f"{figure['value']:.4f}"
        print(f"  {name} {value}{interval}{'; ' if figure['warning'] else ''}{figure['warning']}")
    print(f"  {task.row.out / ROW_NAME}")
    repeated = is_repeated(task, row)
    if repeated is not None:
        print("  all images equal the repeated row's" if repeated else "  images differ from the repeated row's")
    if row["not_measured"]:
        complain("not measured: " + "; ".join(f"{name} ({why})" for name, why in row["not_measured"].items()))
    elif repeated is False:
        complain(f"the images differ from those of {task.row.protocol}: compare the fingerprints of both rows")
    return FAILED if row["not_measured"] or repeated is False else DONE


COMMAND = command(reproduce)
