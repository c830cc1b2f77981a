"""`lantern tune`: measures this machine and writes the fastest method to a profile that method "auto" reads."""

from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, check_file, say
from lantern.cli.options import MAX_SEED, MODEL, MODEL_HELP, Distribution, Placement, command, existing, opt, options
from lantern.core.config import read_json_object

if TYPE_CHECKING:
    from lantern.generation.tuning.tuner import Candidate, Findings

MAX_TV_HELP = "admit relaxed methods up to this mean total variation per token"
QUALITY_HELP = 'KID losses by method and setting: {"lantern++": {"2.0": 0.0004}}'
WRITE_HELP = "also write the tokens per step of windows into the model's folder; `auto` reads them on every machine"


@options
class Choice:
    """What may be chosen (exact methods unless a bound is given)."""

    max_tv: float | None = opt(None, MAX_TV_HELP, 0, 1)
    max_kid: float | None = opt(None, "admit relaxed methods up to this loss in KID", 0, 10)
    quality: Path | None = opt(None, QUALITY_HELP, parse=existing, metavar="FILE")
    max_nodes: int = opt(32, "most nodes of a step, root included", 2, 256)
    max_depth: int = opt(8, "greatest depth of a tree", 1, 16)
    methods: list[str] = opt([], "measure only these, and plain decoding")


@options
class Results:
    """Results."""

    out: Path | None = opt(None, "the profile (default: beside the model, where `auto` finds it)", metavar="FILE")
    write_model: bool = opt(False, WRITE_HELP)
    json: bool = opt(False, "print the profile as JSON instead of a table")
    quiet: bool = opt(False, "print only errors on stderr")


def tune(
    model: str = opt(MODEL, MODEL_HELP),
    prompts_file: str | None = opt(None, "prompts to measure on (default: eight simple ones)", metavar="FILE"),
    images: int = opt(4, "images to count acceptance on", 1, 10_000),
    batch: int = opt(1, "images at a time", 1, 4096),
    seed: int = opt(0, "seed of these images (default 0)", 0, MAX_SEED),
    *,
    where: Placement,
    choice: Choice,
    distribution: Distribution,
    results: Results,
) -> int:
    """Measure this machine and find the fastest method for --method auto."""
    from lantern.generation.tuning.candidates import Bounds

    check_file("--out", results.out)
    bounds = Bounds(choice.max_tv, choice.max_kid, read_json_object(choice.quality) if choice.quality else {})
    from lantern.generation.requests import read_prompts
    from lantern.generation.tuning import tuner
    from lantern.models.folder import load_model

    parts: set[Any] = {"text", "drafter", "codebook"} | ({"vq"} if bounds.admits_relaxed else set())
    loaded = load_model(model, parts=parts, **where.options())
    if prompts_file is not None and not loaded.takes_prompts:
        raise ValueError(f"model {loaded.name} takes class labels, not prompts: leave --prompts-file out")
    found, profile, path = tuner.tune(
        loaded,
        sampling=loaded.sampling(**distribution.given()),
        prompts=() if prompts_file is None else read_prompts(prompts_file),
        images=images,
        batch=batch,
        seed=seed,
        bounds=bounds,
        methods=choice.methods,
        max_nodes=choice.max_nodes,
        max_depth=choice.max_depth,
        out=results.out,
        writes_model=results.write_model,
        report=partial(say, is_quiet=results.quiet, name="measuring"),
    )
    if results.json:
        print(dumps(profile | {"path": str(path)}, sort_keys=True))
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


COMMAND = command(tune)
