"""The commands that measure: `lantern bench`, `tune`, `eval`, `leaderboard` and `reproduce`.

Speed on this machine: bench compares methods, tune chooses one. Quality of images: eval. Both: leaderboard for many
methods on one model, reproduce for one method on the images of a published protocol.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import Group, OneOf, arg, check_file, command, existing, flag, named, opt, outcome, say
from lantern.cli.options import DTYPES, MAX_SEED, MODEL, Apart, Choices, Distribution, Filters, Machine, Placement, Runs
from lantern.core.process import launched
from lantern.engines.engine import OTHER_VARIANTS, VARIANTS
from lantern.methods import METHODS

if TYPE_CHECKING:
    from lantern.core.process import Stopping
    from lantern.eval.metrics.quality import Figure
    from lantern.eval.protocols.generation import Shard
    from lantern.eval.protocols.reproduce import ResolvedRow

VARIANT = OneOf((*VARIANTS, *OTHER_VARIANTS))
SHAPES = ("B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B")
# a test compares both with the registry of lantern.eval
METRICS = (
    *("kid", "fid", "fid-legacy", "precision", "recall", "density", "coverage"),
    *("precision-legacy", "recall-legacy", "is"),
    *("clip", "clip-lantern", "hps", "pickscore", "lpips", "psnr"),
)
WEIGHTS = ("inception", "inception-logits", "clip", "hps", "pickscore", "lpips")
MOMENTS = ".safetensors"
USED_BY_MOMENTS = ("--reference", "--metrics", "--json", "--out", "--threads", "--device", "--quiet", "--debug")
USED_BY_FROM = ("--from", "--docs", "--json", "--quiet", "--debug")
SHOWN = 12  # candidates in the table of `lantern tune`
PROTOCOLS = "coco2014-30k, coco2017-5k-longest, partiprompts, imagenet-50k, emoji"

BENCH_METHODS_HELP = 'such as eagle1 "lantern++:k=5,lambda_=1.5"; default: auto and the model\'s default'
LEADERBOARD_METHODS_HELP = 'such as eagle1 "lantern:k=10/100,delta=0.1" (default: all)'
BENCH_PROMPTS_HELP = "prompts, one a line (or .json, .jsonl, .tsv, .csv; default assets/prompts/concepts.txt, shuffled)"
DRAFTER_HELP = 'methods to measure, such as eagle1 (default), parallelspec or "lantern++:drafts=parallelspec"'
VARIANTS_HELP = "eager, cpu or graph, alone or with +int8, +int4 or +fp8 (default: those of --baseline, else all)"
BENCH_BASELINE_HELP = "how plain decoding runs beside --variants; the fastest is the baseline (default: in all ways)"
MAX_TV_HELP = "admit relaxed methods up to this mean total variation per token, estimated from images (default: none)"
WRITE_HELP = "also write the tokens per step of windows into the model's folder; `auto` reads them on every machine"
PICTURES_HELP = "folders or files of images; or moments (.safetensors) of shards, which are merged"
NETWORKS_HELP = f"weights of networks, NAME of {', '.join(WEIGHTS)}"
FROM_HELP = "print the table of a file, of lines or of figures (--json); nothing is measured"
DOCS_HELP = "write the rows into a page, between <!-- rows: leaderboard --> (or pairs) and <!-- end rows -->"
PAIRS_HELP = "compare these methods, paired by seed (default: each published method with what its paper compares with)"
LINES_HELP = "file of JSON lines, which a stopped or longer run extends"
BASELINE_HELP = "how plain decoding runs beside the methods' engine; the fastest is the baseline (default: all)"
PROTOCOL_HELP = f"{PROTOCOLS}, or a .json file of one; a row.json is repeated with its own choices and compared"


class OfModel(Group):
    """A model (the default)."""

    model: str = MODEL
    methods: list[str] | None = opt(None, BENCH_METHODS_HELP, metavar="METHOD", names=METHODS)
    prompts_file: str | None = opt(None, BENCH_PROMPTS_HELP, metavar="FILE")


class OfShape(Group):
    """A size of LlamaGen with random weights and simulated acceptance."""

    shape: list[str] | None = opt(None, f"of {', '.join(SHAPES)}", type=OneOf(SHAPES), metavar="SIZE")
    tau: list[float] | None = opt(None, "tokens per step to simulate (default 2 3 3.5 4)", 1, 64)
    tokens: int | None = opt(None, "least tokens of the canvas to decode (default 48)", 1, 65535)
    tree: str | None = opt(None, "draft tree (default grown_15_4)")
    drafter: list[str] | None = opt(None, DRAFTER_HELP, metavar="METHOD")


@command
def bench(
    images: int = opt(10, "images of each contender; a claim needs ten times --batch", 1, 10**5),
    batch: list[int] = opt([], "images at a time (default 1)", 1, 4096),
    dtype: list[str] | None = opt(None, "fp32, bf16, fp16 (default fp32 bf16; sizes: bf16)", type=OneOf(DTYPES)),
    variants: list[str] | None = opt(None, VARIANTS_HELP, type=VARIANT),
    baseline: list[str] | None = opt(None, BENCH_BASELINE_HELP, type=VARIANT),
    seed: int = opt(0, "seed of the noise (default 0)", 0, MAX_SEED),
    rounding: bool = opt(False, "also measure how far each variant moves the distributions of tokens from the first's"),
    json: bool = opt(False, "one JSON line on stdout, the table on stderr"),
    out: Path | None = opt(None, "write the JSON line to a file as well", metavar="FILE"),
    *,
    of_model: OfModel,
    distribution: Distribution,
    of_shape: OfShape,
    machine: Machine,
    changed: list[str],
) -> int:
    """Measure the speedup of methods over the fastest plain decoding.

    After a signal the table and the JSON line are those of the whole rounds before.
    """
    others = ["methods", "prompts_file", "rounding", *vars(distribution)] if of_shape.shape else vars(of_shape)
    if wrong := [flag(name) for name in others if flag(name) in changed]:
        other = "a model, not of --shape" if of_shape.shape else "--shape, which is missing"
        raise ValueError(f"{wrong[0]} is an option of {other}")
    check_file("--out", out)
    from lantern.eval.speed import shapes
    from lantern.eval.speed.bench import BenchOptions, measure
    from lantern.eval.speed.contenders import kinds_of
    from lantern.eval.speed.race import CutShort
    from lantern.generation.requests import read_prompts, shuffled_prompts
    from lantern.models.folder import pick_device

    machine.set_threads()
    # plain decoding runs in every way unless --baseline restricts it
    baselines = baseline or kinds_of(pick_device(machine.device))
    chosen: dict[str, Any] = {"dtypes": dtype, "kinds": variants or baseline, "baselines": baselines}
    if of_shape.shape:
        chosen |= {"taus": of_shape.tau, "tokens": of_shape.tokens, "tree": of_shape.tree, "drafters": of_shape.drafter}
    else:
        prompts = shuffled_prompts(None, seed) if of_model.prompts_file is None else read_prompts(of_model.prompts_file)
        chosen |= {"model": of_model.model, "methods": of_model.methods, "prompts": prompts, "batches": batch}
        chosen |= {"sampling": distribution.given(), "seed": seed, "rounding": rounding}
    given = {name: value for name, value in chosen.items() if value}  # others have the defaults of the measurement
    given |= {"images": images, "device": machine.device, "is_quiet": machine.quiet}
    runs: list[Callable[[], dict[str, Any]]] = [
        partial(shapes.measure, shapes.ShapeOptions(shape=shape, batch=size, **given))
        for shape, size in product(of_shape.shape or (), batch or [1])
    ] or [partial(measure, BenchOptions(**given))]
    found: list[dict[str, Any]] = []
    try:
        for run in runs:
            found.append(run())
    except KeyboardInterrupt as stop:
        if found := [*found, *([stop.found] if isinstance(stop, CutShort) else [])]:
            _report_speed(found, out, is_json=json)
        raise (stop.__cause__ or stop) from None
    return _report_speed(found, out, is_json=json)


def _report_speed(found: Sequence[dict[str, Any]], out: Path | None, *, is_json: bool) -> int:
    """Print and write the figures; return 1 if an exact method did not give plain decoding's tokens."""
    from lantern.eval.speed.bench import render

    result = found[0] if len(found) == 1 else {"what": "shapes", "shapes": found}
    _report("\n\n".join(map(render, found)), result, out, is_json=is_json)
    broken = [text for one in found for text in one.get("failures", ())]
    races = [race for one in found for race in one.get("races", [one])]
    if not any(race["results"] for race in races):
        broken.append("no method was measured")
    return outcome(["; ".join(broken)] if broken else [])


def _report(table: str, result: Mapping[str, Any], out: Path | None, *, is_json: bool) -> None:
    """Print a table, or, with the table on stderr, its figures as one line of JSON, and write that line to a file."""
    print(table, file=sys.stderr if is_json else sys.stdout)
    line = dumps(result, ensure_ascii=False, allow_nan=False)
    if is_json:
        print(line)
    if out is not None:
        from lantern.core.io import write_text

        write_text(out, f"{line}\n")


class Race(Group):
    """What is measured."""

    images: int = opt(4, "images of the race of the fastest candidates", 1, 10_000)
    batch: int = opt(1, "images at a time", 1, 4096)
    seed: int = opt(0, "seed of these images (default 0)", 0, MAX_SEED)
    max_tv: float = opt(0.0, MAX_TV_HELP, 0, 1)
    max_nodes: int = opt(32, "most nodes of a step, root included", 2, 256)
    max_depth: int = opt(8, "greatest depth of a tree", 1, 16)
    methods: list[str] = opt([], "measure only these, and plain decoding", names=METHODS)


@command
def tune(
    model: str = MODEL,
    prompts_file: str | None = opt(None, BENCH_PROMPTS_HELP, metavar="FILE"),
    out: Path | None = opt(None, "the profile (default: beside the model, where `auto` finds it)", metavar="FILE"),
    write_model: bool = opt(False, WRITE_HELP),
    json: bool = opt(False, "print the profile as JSON instead of a table"),
    quiet: bool = opt(False, "print only errors on stderr"),
    *,
    race: Race,
    where: Placement,
    distribution: Distribution,
) -> None:
    """Measure this machine and find the fastest method for --method auto."""
    check_file("--out", out)
    from lantern.generation import tuning
    from lantern.generation.requests import read_prompts
    from lantern.models.folder import load_model

    parts: set[Any] = {"text", "drafter", "codebook"} | ({"vq"} if race.max_tv else set())
    loaded = load_model(model, parts=parts, **where.options())
    if prompts_file is not None and not loaded.takes_prompts:
        raise ValueError(f"model {loaded.name} takes class labels, not prompts: leave --prompts-file out")
    profile, path = tuning.tune(
        loaded,
        sampling=loaded.sampling(**distribution.given()),
        prompts=() if prompts_file is None else read_prompts(prompts_file),
        out=out,
        writes_model=write_model,
        report=partial(say, is_quiet=quiet, name="measuring"),
        **vars(race),
    )
    if json:
        print(dumps(profile | {"path": str(path)}, sort_keys=True))
    else:
        print("\n".join([*_candidates(profile), f"profile: {path}"]))


def _candidates(profile: Mapping[str, Any]) -> list[str]:
    """Return plain decoding and the best candidates as lines of a table; the chosen one is marked.

    An interval has what raced plain decoding in at least ten rounds, as the chosen one.
    """
    from lantern.eval.speed.bench import aligned
    from lantern.generation.tuning import label

    choice = profile["choice"]
    rows = [("", "method", "tokens/step", "ms/token", "speedup", "95 % interval", "total variation")]
    for one in [profile["plain"], *profile["candidates"][:SHOWN]]:
        rows.append(
            (
                "*" if one == choice else "",
                label(one["method"], one["settings"]),
                f"{one['tokens_per_step']:.2f}",
                f"{one['milliseconds_per_token']:.2f}",
                f"{one['speedup']:.2f}x",
                "-" if one["interval_95"] is None else "{:.2f} to {:.2f}".format(*one["interval_95"]),
                f"{one['total_variation']:.3f}",
            )
        )
    return aligned(rows) + ([f"tree: {choice['settings']['tree']}"] if "tree" in choice["settings"] else [])


@command
def evaluate(
    pictures: list[Path] = arg(PICTURES_HELP, type=existing),
    reference: Path | None = opt(None, "real images, a folder of `lantern train data`, or statistics", type=existing),
    metrics: list[str] | None = opt(None, f"metrics: {', '.join(METRICS)}; default kid fid", metavar="METRIC"),
    prompts: str | None = opt(None, "a prompt an image, in order of names (default: in the files)", metavar="FILE"),
    protocol: str | None = opt(None, f"resize all images first as {PROTOCOLS} do", metavar="NAME"),
    weights: list[tuple[str, Path]] = opt([], NETWORKS_HELP, type=named(Path, names=WEIGHTS)),
    cache: Path | None = opt(None, "folder of weights (default: $LANTERN_CACHE)", metavar="FOLDER"),
    seed: int = opt(0, "seed of the intervals (default 0)", 0, MAX_SEED),
    draws: int = opt(1000, "samples of an interval, 20 or more, or 0; at most 100 for FID (default 1000)", 0, 10**5),
    batch: int = opt(32, "images at a time", 1, 4096),
    keep_moments: Path | None = opt(None, "write Inception's moments there, to merge shards", metavar="FOLDER"),
    json: bool = opt(False, "one JSON line on stdout, the table on stderr"),
    out: Path | None = opt(None, "write the JSON line to a file as well", metavar="FILE"),
    *,
    machine: Machine,
    changed: list[str],
) -> None:
    """Measure the quality of images: KID, FID, CLIP score and others."""
    check_file("--out", out)
    names = [name for name, _ in weights]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--weights names {twice[0]} twice")
    from lantern.eval.metrics.quality import Options, fid_of_shards, measure
    from lantern.eval.speed.surroundings import surroundings
    from lantern.models.folder import pick_device

    machine.set_threads()
    device = pick_device(machine.device)
    if pictures[0].suffix == MOMENTS:
        if reference is None:
            raise ValueError("moments need those of a reference: give them with --reference")
        if unused := [name for name in changed if name not in USED_BY_MOMENTS]:
            raise ValueError(f"got {', '.join(unused)}, which moments do not use: leave out, or give images")
        figure = fid_of_shards(pictures, reference, metrics)
        figures = {figure.name: figure}
    else:
        from lantern.eval.metrics.pictures import find_pictures
        from lantern.eval.protocols.protocol import load_protocol
        from lantern.generation.requests import read_prompts

        options = Options(
            prompts_name=Path(prompts).name if prompts else "",
            cache=cache,
            draws=draws,
            batch=batch,
            device=device,
            moments=keep_moments,
            is_quiet=machine.quiet,
            **(load_protocol(protocol).resized if protocol else {}),
        )
        paths = [path for one in pictures for path in (find_pictures(one) if one.is_dir() else [one])]
        texts = read_prompts(prompts) if prompts else None
        how = {"weights": dict(weights), "seed": seed, "options": options}
        figures = measure(paths, reference, metrics or ["kid", "fid"], prompts=texts, **how)
    shown = {name: figure.as_dict() for name, figure in figures.items()}
    result = {"what": "eval", "figures": shown, "surroundings": surroundings(device)}
    _report("\n".join(_lines(figures)), result, out, is_json=json)


def _lines(figures: Mapping[str, "Figure"]) -> list[str]:
    """Return the figures as lines of a table, each warning below its figure."""
    lines = []
    for name, figure in figures.items():
        ends = "" if figure.interval is None else f"[{figure.interval[0]:.5g}, {figure.interval[1]:.5g}]"
        count = figure.reference_images or "the statistics"
        against = f" against {count} of {figure.reference}" if figure.reference else ""
        lines.append(f"{name:<17} {figure.value:>10.5g}  {ends:<22} {figure.images} images{against}".rstrip())
        if figure.warning:
            lines.append(f"{'':<17} warning: {figure.warning}")
    return lines


@command
def leaderboard(
    results: Path | None = opt(None, FROM_HELP, type=existing, metavar="FILE", flag="--from"),
    out: Path = opt(Path("runs/leaderboard.jsonl"), LINES_HELP, metavar="FILE"),
    docs: Path | None = opt(None, DOCS_HELP, type=existing, metavar="PAGE"),
    json: bool = opt(False, "print the figures of the table as one JSON line"),
    model: str = MODEL,
    methods: list[str] = opt([], LEADERBOARD_METHODS_HELP, metavar="METHOD", names=METHODS),
    pairs: list[str] | None = opt(None, PAIRS_HELP, metavar="A==B", nargs="*"),
    rules: bool = opt(False, "each relaxed rule at several strengths, on the same tree or window"),
    images: int = opt(8, "images per method", 1, 10**5),
    batch: int = opt(1, "images at a time", 1, 4096),
    prompts_file: str | None = opt(None, "prompts, one per line (default assets/prompts/concepts.txt)", metavar="FILE"),
    temperature: list[float] = opt([], "one or more temperatures, 0 is greedy (default: the model's)", 0, 100),
    seed: int = opt(0, "seed of noise and order of prompts (default 0)", 0, MAX_SEED),
    dtype: str = opt("fp32", "dtype of methods: fp32, bf16 or fp16", type=OneOf(DTYPES)),
    baseline: list[str] = opt([], BASELINE_HELP, type=VARIANT),
    metrics: list[str] | None = opt(None, "quality of relaxed methods, as `lantern eval` measures, such as kid clip"),
    reference: Path | None = opt(None, "--metrics: real images or their statistics", type=existing),
    weights: list[tuple[str, Path]] = opt([], "--metrics: as clip=FOLDER", type=named(existing, names=WEIGHTS)),
    *,
    filters: Filters,
    runs: Runs,
    machine: Machine,
    changed: list[str],
) -> int:
    """Measure methods in one run, as JSON lines and a table."""
    from lantern.core.io import write_text
    from lantern.eval.boards.board import Board, BoardOptions, parse_pair, shipped
    from lantern.eval.boards.table import check_page, figures_of, markdown, rendered
    from lantern.eval.metrics.quality import check_reference, in_order, obstacle
    from lantern.eval.speed.contenders import Variant
    from lantern.generation.requests import shuffled_prompts

    unused = ", ".join(name for name in changed if name not in USED_BY_FROM)
    if results is not None and unused:
        raise ValueError(f"got {unused}, which --from does not use: leave out, or leave --from out to measure")
    if docs is not None:
        check_page(docs.read_text(encoding="utf-8"))
    if results is None:
        if metrics is None and (reference or weights):
            raise ValueError("--reference and --weights are options of --metrics, which is missing")
        if out.parent.is_dir():
            check_file("--out", out)
        machine.set_threads()
        options = BoardOptions(
            out=out,
            prompts=shuffled_prompts(prompts_file, seed),
            methods=(*methods, *(shipped("rules") if rules else ())),
            pairs=() if pairs is None else tuple(map(parse_pair, pairs or shipped("pairs"))),
            images=images,
            batch=batch,
            model=model,
            variant=Variant.of(runs.chosen(), dtype),
            baselines=tuple(baseline),
            baseline_dtypes=("fp32", "bf16") if dtype != "fp16" else ("fp32", "fp16"),
            sampling=filters.given(),
            temperatures=tuple(temperature),
            seed=seed,
            device=machine.device,
            is_quiet=machine.quiet,
        )
        if metrics is not None:
            has_pictures = reference is None or reference.is_dir()  # a file of statistics has none, and adds no KID
            for name in in_order(metrics, images=images, has_pictures=has_pictures):
                if why := obstacle(name, reference, dict(weights)):
                    raise ValueError(f"{name}: {why}")
            check_reference(metrics, [Path(f"{number:06}.png") for number in range(images)], reference)
        board = Board(options)
        if metrics is not None and board.model.vq is None:
            raise ValueError(f"model {board.model.name} has no vqvae/ folder, which --metrics needs")
        board.measure()
        if metrics is not None:
            board.judge(metrics, reference, dict(weights))
    found = figures_of(results or out)
    if json or docs is None:
        print(dumps(found, ensure_ascii=False) if json else markdown(found))
    if docs is not None:
        write_text(docs, rendered(docs.read_text(encoding="utf-8"), found))
    failures = [*found["failures"]]
    if not any("images" in row for board in found["boards"] for row in board["rows"]):
        failures.append("no method was measured")
    return outcome(failures)


@command
def reproduce(
    protocol: str = arg(PROTOCOL_HELP),
    out: Path | None = opt(None, "default: runs/PROTOCOL/METHOD", metavar="FOLDER"),
    shard: str | None = opt(None, "make only part I of N; torchrun and accelerate set it automatically", metavar="I/N"),
    weights: list[tuple[str, Path]] = opt([], NETWORKS_HELP, type=named(Path, names=WEIGHTS)),
    quiet: bool = opt(False, "print only errors on stderr"),
    *,
    choices: Choices,
    where: Apart,
    stopping: "Stopping",
) -> int | None:
    """Make the images of a published protocol, measure them, and write the row; resumes if stopped."""
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
    task = protocols.prepare(row)
    for name, why in protocols.obstacles(task).items():
        say(f"{name} will not be measured: {why}", quiet)
    # the callback stops if a signal's exception was swallowed
    made = protocols.make(task, shield=stopping.shield, callback=lambda step: stopping.check())
    entries = protocols.complete(task)
    if entries is None:
        say(f"{made} images made; other shards are incomplete: when they are done, run the same without --shard", quiet)
    elif row.shard is not None and row.shard.count > 1:
        complete = f"all {len(entries)} are complete: run the same without --shard to measure them"
        say(f"{made} images made, {complete}", quiet)
    else:
        return _report_row(task, protocols.conclude(task, entries))
    return None


def _shard(text: str | None, *, has_ray: bool) -> "Shard | None":
    """Return the shard of this process, by option or by its launcher."""
    from lantern.eval.protocols.generation import Shard

    rank, processes = launched()
    own = Shard(rank + 1, processes) if processes > 1 else None
    if text is None:
        return None if has_ray else own
    if has_ray:
        raise ValueError("--ray distributes the work itself: leave --shard out")
    given = Shard.parse(text)
    if own not in (None, given):
        raise ValueError(f"--shard {text}, but the launcher sets {rank + 1}/{processes}: leave it out")
    return given


def _report_row(task: "ResolvedRow", row: dict[str, Any]) -> int:
    """Print the row and its errors; return the exit code."""
    from lantern.eval.protocols.reproduce import ROW_NAME, is_repeated
    from lantern.generation.images import cost_of

    speed = row["speed"]
    print(f"{task.protocol.name}, {row['choices']['method']}: {row['pictures']} images")
    seconds, cost = speed["seconds_per_picture"], cost_of(speed)
    print(f"  {speed['tokens_per_step']:.2f} tokens per step, {seconds:.2f} s per image{cost}")
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
        return outcome(["not measured: " + "; ".join(f"{name} ({why})" for name, why in row["not_measured"].items())])
    differs = f"the images differ from those of {task.row.protocol}: compare the fingerprints of both rows"
    return outcome([differs] if repeated is False else [])
