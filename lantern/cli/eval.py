"""`lantern eval`: quality metrics of images, each with its interval, reference and warnings."""

import sys
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import arg, changed, check_file, command, existing, named, opt
from lantern.cli.options import MAX_SEED, Machine

if TYPE_CHECKING:
    from lantern.eval.metrics.quality import Figure

# a test compares both with the registry of lantern.eval
METRICS = (
    *("kid", "fid", "fid-legacy", "precision", "recall", "density", "coverage", "is"),
    *("clip", "clip-lantern", "hps", "pickscore", "lpips", "psnr"),
)
WEIGHTS = ("inception", "inception-logits", "clip", "hps", "pickscore", "lpips")
MOMENTS = ".safetensors"
USED_BY_MOMENTS = ("--reference", "--metrics", "--json", "--out", "--threads", "--device", "--quiet")
PICTURES_HELP = "folders or files of images; or moments (.safetensors) of shards, which are merged"
WEIGHTS_HELP = f"weights of networks, NAME of {', '.join(WEIGHTS)}"


def eval_(
    pictures: list[Path] = arg(PICTURES_HELP, type=existing),
    reference: Path | None = opt(None, "real images, a folder of `lantern train data`, or statistics", type=existing),
    metrics: list[str] | None = opt(None, f"metrics: {', '.join(METRICS)}; default kid fid", metavar="METRIC"),
    prompts: str | None = opt(None, "a prompt an image, in order of names (default: in the files)", metavar="FILE"),
    weights: list[tuple[str, Path]] = opt([], WEIGHTS_HELP, type=named(Path, names=WEIGHTS), metavar="NAME=PATH"),
    cache: Path | None = opt(None, "folder of weights (default: $LANTERN_CACHE)", metavar="FOLDER"),
    seed: int = opt(0, "seed of the bootstrap (default 0)", 0, MAX_SEED),
    draws: int = opt(1000, "bootstrap samples, 20 or more, or 0; at most 100 for FID (default 1000)", 0, 10**5),
    batch: int = opt(32, "images at a time", 1, 4096),
    keep_moments: Path | None = opt(None, "write Inception's moments there, to merge shards", metavar="FOLDER"),
    json: bool = opt(False, "one JSON line on stdout, the table on stderr"),
    out: Path | None = opt(None, "write the figures to a JSON file as well", metavar="FILE"),
    *,
    machine: Machine,
) -> None:
    """Measure the quality of images."""
    given = locals()
    check_file("--out", out)
    names = [name for name, _ in weights]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--weights names {twice[0]} twice")
    from lantern.core.io import write_json
    from lantern.eval.metrics.quality import Options, fid_of_shards, measure
    from lantern.eval.speed.surroundings import surroundings
    from lantern.models.folder import pick_device

    machine.set_threads()
    device = pick_device(machine.device)
    if pictures[0].suffix == MOMENTS:
        if reference is None:
            raise ValueError("moments need those of a reference: give them with --reference")
        if unused := changed(eval_, given, but=USED_BY_MOMENTS):
            raise ValueError(f"got {', '.join(unused)}, which moments do not use: leave out, or give images")
        figure = fid_of_shards(pictures, reference, metrics)
        figures = {figure.name: figure}
    else:
        from lantern.eval.metrics.pictures import find_pictures
        from lantern.generation.requests import read_prompts

        options = Options(
            prompts_name=Path(prompts).name if prompts else "",
            cache=cache,
            draws=draws,
            batch=batch,
            device=device,
            moments=keep_moments,
            is_quiet=machine.quiet,
        )
        paths = [path for one in pictures for path in (find_pictures(one) if one.is_dir() else [one])]
        texts = read_prompts(prompts) if prompts else None
        how = {"weights": dict(weights), "seed": seed, "options": options}
        figures = measure(paths, reference, metrics or ["kid", "fid"], prompts=texts, **how)
    print(render(figures), file=sys.stderr if json else sys.stdout)
    shown = {name: figure.as_dict() for name, figure in figures.items()}
    result = {"what": "eval", "figures": shown, "surroundings": surroundings(device)}
    if json:
        print(dumps(result, ensure_ascii=False, allow_nan=False))
    if out is not None:
        write_json(out, result)


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


COMMAND = command(eval_)
