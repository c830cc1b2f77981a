"""`python -m recipes.emoji.card`: compute the figures of a model card; write JSON and the table of its README."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, Command, existing, integer, nearest, real, run_command
from lantern.core.config import read_json_object

if TYPE_CHECKING:
    from recipes.emoji.study import Study

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("transformer", "vqvae", "text_encoder")
RESULTS_NAME, README_NAME = "card.json", "README.md"
# the names for --only; a test compares them with card_figures.FIGURES
NAMES = ("size", "reconstruction", "loss", "entropy", "retrieval", "memorisation", "sheet")
DEFAULTS: Mapping[str, Any] = {"seed": 0, "limit": 0, "batch": 32, "model": "lantern-emoji"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(CARD, argv, prog="python -m recipes.emoji.card")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--model", default=DEFAULTS["model"], help="name, folder or hub id of the model")
    add("--data", type=existing, required=True, help="folder written by `lantern train data`")
    add("--packages", type=existing, required=True, help="folder with the wheel of the retrieval network")
    add("--prompts", type=Path, default=ROOT / "assets" / "prompts", help="folder of the evaluation prompts")
    add("--only", nargs="+", metavar="FIGURE", help=f"figures to compute, of {', '.join(NAMES)} (default all)")
    add(
        "--limit",
        type=integer(0, 10**6),
        default=DEFAULTS["limit"],
        help="largest number of items per set, 0 for all (default 0)",
    )
    add("--batch", type=integer(1, 4096), default=DEFAULTS["batch"], help="pictures made at a time (default 32)")
    add("--guidance", type=real(0, 1000), help="instead of the model's own")
    add("--temperature", type=real(0, 100), help="instead of the model's own")
    add("--top-k", type=integer(0, 2**31 - 1), help="instead of the model's own")
    add("--top-p", type=real(0, 1), help="instead of the model's own")
    add(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=DEFAULTS["seed"],
        help="seed of noise and random choices (default 0)",
    )
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--device", default="auto", help="cpu, cuda or auto")
    add(
        "--recognised",
        type=integer(0, 10**6),
        help="number of contact-sheet images that a reader without the prompts names right",
    )
    add("--out", type=Path, default=ROOT / "eval" / "results", help=f"folder of {RESULTS_NAME}")
    add("--card", type=Path, help=f"folder of {README_NAME} and the sheets (default: the model's)")


def run(args: argparse.Namespace) -> int:
    """Compute each figure and write it at once, so that an interrupted run keeps finished ones."""
    names = check_names(args.only)
    import torch

    from lantern.core.io import WEIGHTS_NAME, resolve_model, sha256_of
    from lantern.eval.speed.surroundings import HERE, commit
    from recipes.emoji.card_figures import FIGURES, component_sizes

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    home = args.card or folder
    card = read_card(
        args.out / RESULTS_NAME, weights={name: sha256_of(folder / name / WEIGHTS_NAME) for name in COMPONENTS}
    )
    card["torch"] = torch.__version__.partition("+")[0]
    write(card, args.out, home)
    study = open_study(args, home) if set(names) - {"size"} else None
    for name in names:
        sizes: dict[str, Any] = {"components": component_sizes(folder)}
        figure = FIGURES[name](study) if study and name in FIGURES else sizes
        if name == "sheet":
            figure["recognised"] = recognised(figure, card["figures"].get(name, {}), args.recognised)
        card["figures"][name] = {"command": command_line(args, name), "commit": commit(HERE)} | figure
        card["figures"] = {known: card["figures"][known] for known in NAMES if known in card["figures"]}
        write(card, args.out, home)
        print(f"{name}: written to {args.out / RESULTS_NAME}", file=sys.stderr)
    return DONE


def check_names(only: Sequence[str] | None) -> list[str]:
    """Return the figures to compute, in the order of the card; ValueError for an unknown name."""
    for name in only or ():
        if name not in NAMES:
            hint = nearest(name, NAMES) or f"; known are {', '.join(NAMES)}"
            raise ValueError(f"--only {name[:40]!r} is not a figure{hint}")
    return [name for name in NAMES if not only or name in only]


def open_study(args: argparse.Namespace, home: Path) -> "Study":
    """Load model and data."""
    from lantern.models.folder import load_model
    from lantern.training.data import Prepared
    from recipes.emoji.study import Study

    model = load_model(args.model, device=args.device, dtype="fp32", engine="eager", parts=("vq", "text"))
    sampling = model.sampling(guidance=args.guidance, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    return Study(
        model=model,
        prepared=Prepared.open(args.data),
        packages=args.packages,
        prompts=args.prompts,
        pictures=home,
        sampling=sampling,
        seed=args.seed,
        limit=args.limit,
        batch=args.batch,
    )


def read_card(path: Path, *, weights: Mapping[str, str]) -> dict[str, Any]:
    """Return the stored card; without figures if there is none or if it belongs to other weights.

    ValueError for a file that is not a card.
    """
    empty: dict[str, Any] = {"weights": dict(weights), "torch": "", "figures": {}}
    if not path.is_file():
        return empty
    card = read_json_object(path)
    if not isinstance(card.get("figures"), dict):
        raise ValueError(f"{path} is not a card of figures: delete it")
    if card.get("weights") != dict(weights):
        if card["figures"]:
            print(f"{path} belongs to other weights: its figures are dropped", file=sys.stderr)
        return empty
    return card


def recognised(figure: Mapping[str, Any], before: Mapping[str, Any], given: int | None) -> int | None:
    """Return the number of recognised images: as given, or as stored for the same images.

    ValueError for more than the images of the sheet.
    """
    if given is not None and given > figure["prompts"]:
        raise ValueError(f"--recognised is {given}, but the contact sheet has {figure['prompts']} images")
    is_same = before.get("codes_sha256") == figure["codes_sha256"]
    return given if given is not None else before.get("recognised") if is_same else None


def write(card: Mapping[str, Any], out: Path, home: Path) -> None:
    """Write the JSON, and the table into the card's README if there is one."""
    from lantern.core.io import atomic_write, write_json

    write_json(out / RESULTS_NAME, card)
    readme = home / README_NAME
    if readme.is_file():
        text = insert(readme.read_text(encoding="utf-8"), render(card))
        with atomic_write(readme) as temporary:
            temporary.write_text(text, encoding="utf-8")


def command_line(args: argparse.Namespace, name: str) -> str:
    """Return the command that repeats one figure; folders outside the working folder are given by name only."""
    words = ["python -m recipes.emoji.card", "--only", name]
    for option in ("data", "packages", "model"):
        value = getattr(args, option)
        if value != DEFAULTS.get(option):
            words += [f"--{option}", shown(Path(value))]
    for option in ("limit", "batch", "seed", "guidance", "temperature", "top_k", "top_p"):
        value = getattr(args, option)
        if value != DEFAULTS.get(option):
            words += [f"--{option.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def shown(path: Path) -> str:
    """Return a path relative to the working folder, or the last part of another path."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.name


CARD = Command("card", "Compute the figures of a model card.", add_arguments, run)


# the table of the README: Markdown from the figures, between two marks
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
COMMAND = "python -m recipes.emoji.card"
Row = tuple[str, str, str]  # what, value, name of the figure


def insert(readme: str, block: str) -> str:
    """Return a README with the text between its marks replaced; ValueError for missing marks."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no lines {BEGIN} and {END}: add them where the figures belong")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def render(card: Mapping[str, Any]) -> str:
    """Return the block of a card: table, memorisation in words, and commands."""
    figures = card.get("figures", {})
    rows = [row for kind, rows_of in ROWS.items() for row in (rows_of(figures[kind]) if kind in figures else [])]
    if not rows:
        return "No figures yet."
    lines = ["| figure | value | `--only` |", "|---|---|---|"]
    lines += [f"| {what} | {value} | {name} |" for what, value, name in rows]
    parts = ["\n".join(lines)]
    if "memorisation" in figures:
        parts.append(in_words(figures["memorisation"]))
    parts.append("\n".join(["Commands that repeat each figure:", "", *commands(figures)]))
    return "\n\n".join(parts)


def commands(figures: Mapping[str, Any]) -> list[str]:
    """Return the commands of the figures as a block of shell."""
    found = [figures[kind]["command"] for kind in ROWS if kind in figures]
    return ["```sh", *dict.fromkeys(found), "```"]


def percent(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.1f} %"


def size_rows(sizes: Mapping[str, Any]) -> Iterator[Row]:
    """Yield parameters and bytes."""
    for name, size in sizes["components"].items():
        yield f"{name}: parameters", f"{size['parameters'] / 1e6:.2f} M, {size['bytes'] / 2**20:.1f} MiB", "size"
    total = sum(size["bytes"] for size in sizes["components"].values())
    yield "all weights", f"{total / 2**20:.1f} MiB", "size"


def reconstruction_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield PSNR and codebook use."""
    name = "reconstruction"
    n = figure["heldout_pictures"]
    yield (
        f"reconstruction PSNR, {n} held-out cells (worst)",
        f"{figure['psnr_db']:.2f} dB ({figure['psnr_db_worst']:.2f})",
        name,
    )
    use = f"{percent(figure['codebook_used'])} of {figure['codebook_size']}, perplexity {figure['perplexity']:.0f}"
    yield f"codebook use, {figure['training_pictures']} training images", use, name


def loss_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield held-out and training loss."""
    for key, what in (("heldout", "held-out"), ("training", "training")):
        part = figure[key]
        losses = [part[f"nats_per_code{end}"] for end in ("", "_with_style", "_without_caption")]
        shown = " / ".join(f"{value:.3f}" for value in losses)
        yield f"loss on {part['pictures']} {what} cells: caption / with style / none", f"{shown} nats per code", "loss"
        gains = [part[f"caption{middle}_nats_per_picture"] for middle in ("", "_with_style")]
        shown = " / ".join(f"{value:.1f}" for value in gains)
        yield f"information in the caption, {what}: name / name and style", f"{shown} nats per image", "loss"


def entropy_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield entropy of p."""
    for scale, part in figure["guidance"].items():
        cuts = " / ".join(f"{cut:.2f}" for cut in part["quantiles"].values())
        names = "/".join(key.rstrip("%") for key in part["quantiles"])
        yield (
            f"entropy of p at guidance {scale}, temperature 1: mean ({names} %)",
            f"{part['mean']:.2f} ({cuts}) nats",
            "entropy",
        )
        masses = f"{part['top1_mass_mean']:.2f} ({part['top1_mass_median']:.2f}), {part['top10_mass_mean']:.2f}"
        yield f"mass of the most probable code (median), of the top ten, at guidance {scale}", masses, "entropy"


RETRIEVAL_SETS = {
    "trained": "trained concepts",
    "trained_recognised": "those of `recognised.txt`, chosen on images of other seeds",
    "styled": "trained cells, prompted with style",
    "heldout": "held-out cells, prompted with style",
    "synonyms": "synonyms that occur in no caption",
    "synonyms_by_name": "the same, replaced by the nearest names as `lantern-generate` does",
    "synonyms_by_name_recognised": "the same, synonyms of names in `recognised.txt`",
    "reconstructed": "for comparison: reconstructions of trained images",
    "heldout_real": "for comparison: held-out real images",
    "real_across_styles": "for comparison: real images, among other styles only",
}


def retrieval_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield accuracy by set of prompts."""
    for key, what in RETRIEVAL_SETS.items():
        if key not in figure:  # a model without `recognised.txt`
            continue
        part = figure[key]
        shown = []
        for top in ("top1", "top5"):
            low, high = part[f"{top}_interval"]
            shown.append(f"{percent(part[top])} ({100 * low:.0f}-{100 * high:.0f})")
        yield f"nearest to its own concept, top-1 / top-5: {what}, n = {part['n']}", " / ".join(shown), "retrieval"
    chance = f"{percent(figure['chance_top1'])} / {percent(figure['chance_top5'])}"
    yield f"by chance, {figure['concepts']} concepts", chance, "retrieval"


def memorisation_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield copies and distances to training images."""
    name = "memorisation"
    for key, what in (("generated", "generated images"), ("heldout_real", "held-out real images")):
        part = figure[key]
        cuts = " / ".join(f"{cut:.2f}" for cut in part["ratio_quantiles"].values())
        yield f"copies among {part['n']} {what}", percent(part["copies"]), name
        yield f"distance to the nearest training image / tokenizer error, {what} (10/50/90 %)", cuts, name
        yield (
            f"codes equal to its codes: mean; images with 90 % equal, {what}",
            (f"{percent(part['same_codes_mean'])}; {percent(part['same_codes_copies'])}"),
            name,
        )
        yield f"cosine to the nearest training image, {what}, median", f"{part['feature_cosine_median']:.3f}", name


def sheet_rows(figure: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the images that a reader recognises."""
    seen = figure["recognised"]
    value = "not yet counted" if seen is None else f"{seen} of {figure['prompts']}"
    yield (
        f"pictures of [the contact sheet]({figure['file']}) that a reader without the prompts names right",
        value,
        "sheet",
    )


def in_words(figure: Mapping[str, Any]) -> str:
    """Return the result of the memorisation check as text."""
    made, real = figure["generated"], figure["heldout_real"]
    return (
        f"**Memorisation.** {percent(made['copies'])} of {made['n']} images made from training captions are copies. "
        f"A copy is nearer to one of {figure['training_pictures']} training images than "
        f"{figure['copy_ratio']:g} times the tokenizer's own error on it. "
        f"Of {real['n']} held-out real images, {percent(real['copies'])} are that near. "
        f"[{figure['sheet']}]({figure['sheet']}) shows sixteen generated images, from the nearest to the farthest, "
        "above their nearest training images."
    )


ROWS = {
    "size": size_rows,
    "reconstruction": reconstruction_rows,
    "loss": loss_rows,
    "entropy": entropy_rows,
    "retrieval": retrieval_rows,
    "memorisation": memorisation_rows,
    "sheet": sheet_rows,
}


if __name__ == "__main__":
    sys.exit(main())
