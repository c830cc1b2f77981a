"""`lantern tune`: measures this machine and writes the fastest method to a profile that method "auto" reads."""

from collections.abc import Mapping
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from lantern.cli.command import Group, check_file, command, opt, say
from lantern.cli.options import MAX_SEED, MODEL, MODEL_HELP, Distribution, Placement

SHOWN = 12  # candidates in the table
MAX_TV_HELP = "admit relaxed methods up to this mean total variation per token (default: only exact ones)"
WRITE_HELP = "also write the tokens per step of windows into the model's folder; `auto` reads them on every machine"


class Race(Group):
    """What is measured."""

    images: int = opt(4, "images of the race of the fastest candidates", 1, 10_000)
    batch: int = opt(1, "images at a time", 1, 4096)
    seed: int = opt(0, "seed of these images (default 0)", 0, MAX_SEED)
    max_tv: float = opt(0.0, MAX_TV_HELP, 0, 1)
    max_nodes: int = opt(32, "most nodes of a step, root included", 2, 256)
    max_depth: int = opt(8, "greatest depth of a tree", 1, 16)
    methods: list[str] = opt([], "measure only these, and plain decoding")


def tune(
    model: str = opt(MODEL, MODEL_HELP),
    prompts_file: str | None = opt(None, "prompts to measure on (default: eight simple ones)", metavar="FILE"),
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
        print("\n".join([*table(profile), f"profile: {path}"]))


def table(profile: Mapping[str, Any]) -> list[str]:
    """Return plain decoding and the best candidates as lines of a table; the chosen one is marked.

    An interval has what raced against plain decoding; of the others one batch was made.
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


COMMAND = command(tune)
