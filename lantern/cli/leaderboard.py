"""`lantern leaderboard`: methods on one model in one run, as JSON lines and a table."""

from json import dumps
from pathlib import Path

from lantern.cli.command import DONE, FAILED, OneOf, changed, check_file, command, complain, existing, named, opt
from lantern.cli.eval import WEIGHTS
from lantern.cli.options import DTYPES, MAX_SEED, MODEL, MODEL_HELP, VARIANT, Filters, Machine, Runs

FROM_HELP = "print the table of a file, of lines or of figures (--json); nothing is measured"
DOCS_HELP = "write the rows into a page, between <!-- rows: leaderboard --> (or pairs) and <!-- end rows -->"
TEMPERATURE_HELP = "one or more temperatures, 0 is greedy (default: the model's)"
METHODS_HELP = 'such as eagle1 "lantern:k=10/100,delta=0.1" (default: all)'
PAIRS_HELP = "compare these methods, paired by seed (default: each published method with what its paper compares with)"
PROMPTS_HELP = "prompts, one per line (default assets/prompts/concepts.txt)"
OUT_HELP = "file of JSON lines, which a stopped or longer run extends"
BASELINE_HELP = "how plain decoding runs beside the methods' engine; the fastest is the baseline (default: all)"


def leaderboard(
    results: Path | None = opt(None, FROM_HELP, type=existing, metavar="FILE", flag="--from"),
    out: Path = opt(Path("runs/leaderboard.jsonl"), OUT_HELP, metavar="FILE"),
    docs: Path | None = opt(None, DOCS_HELP, type=existing, metavar="PAGE"),
    json: bool = opt(False, "print the figures of the table as one JSON line"),
    model: str = opt(MODEL, MODEL_HELP),
    methods: list[str] | None = opt(None, METHODS_HELP, metavar="METHOD"),
    pairs: list[str] | None = opt(None, PAIRS_HELP, metavar="A==B", nargs="*"),
    rules: bool = opt(False, "each relaxed rule at several strengths, on the same tree or window"),
    images: int = opt(8, "images per method", 1, 10**5),
    batch: int = opt(1, "images at a time", 1, 4096),
    prompts_file: str | None = opt(None, PROMPTS_HELP, metavar="FILE"),
    temperature: list[float] = opt([], TEMPERATURE_HELP, 0, 100),
    seed: int = opt(0, "seed of noise and order of prompts (default 0)", 0, MAX_SEED),
    dtype: str = opt("fp32", "dtype of methods: fp32, bf16 or fp16", type=OneOf(DTYPES)),
    baseline: list[str] = opt([], BASELINE_HELP, type=VARIANT),
    metrics: list[str] | None = opt(None, "quality of relaxed methods, as `lantern eval` measures, such as kid clip"),
    reference: Path | None = opt(None, "--metrics: real images or their statistics", type=existing),
    weights: list[tuple[str, Path]] = opt(
        [], "--metrics: as clip=FOLDER", type=named(existing, names=WEIGHTS), metavar="NAME=PATH"
    ),
    *,
    filters: Filters,
    runs: Runs,
    machine: Machine,
) -> int:
    """Measure methods in one run, as JSON lines and a table."""
    given = locals()
    from lantern.eval.boards.board import Board, BoardOptions, parse_pair, shipped
    from lantern.eval.boards.table import figures_of, markdown, rendered
    from lantern.eval.metrics.quality import check_reference, in_order, obstacle
    from lantern.eval.speed.contenders import Variant

    if results is not None and (unused := changed(leaderboard, given, but=("--from", "--docs", "--json", "--quiet"))):
        raise ValueError(
            f"got {', '.join(unused)}, which --from does not use: leave out, or leave --from out to measure"
        )
    if results is None:
        if metrics is None and (reference or weights):
            raise ValueError("--reference and --weights are options of --metrics, which is missing")
        if out.parent.is_dir():
            check_file("--out", out)
        machine.set_threads()
        options = BoardOptions(
            out=out,
            prompts=shuffled_prompts(prompts_file, seed),
            methods=(*(methods or ()), *(shipped("rules") if rules else ())),
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
    if docs is not None:
        docs.write_text(rendered(docs.read_text(encoding="utf-8"), found), encoding="utf-8")
    if json or docs is None:
        print(dumps(found, ensure_ascii=False) if json else markdown(found))
    for failure in found["failures"]:
        complain(failure)
    return FAILED if found["failures"] else DONE


def shuffled_prompts(file: str | None, seed: int) -> list[str]:
    """Return the prompts of a file in an order given by the seed, so that a longer run extends a shorter one."""
    import torch

    from lantern.core.config import shipped_folder
    from lantern.generation.requests import read_prompts

    path = file or shipped_folder("assets", "prompts") / "concepts.txt"
    prompts = read_prompts(str(path))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed % 2**32))
    return [prompts[i] for i in order.tolist()]


COMMAND = command(leaderboard)
