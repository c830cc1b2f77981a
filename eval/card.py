"""`python -m lantern.eval.card`: takes the figures of a model card, as JSON and into the card's table."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, Command, nearest, run_command
from lantern.cli.values import existing, integer, real

if TYPE_CHECKING:
    from lantern.eval.study import Study

HERE = Path(__file__).resolve().parent
RESULTS_NAME, README_NAME = "card.json", "README.md"
# the names that --only takes; a test holds them to those of lantern.eval.figures
NAMES = ("size", "reconstruction", "loss", "entropy", "retrieval", "memorisation", "sheet")
DEFAULTS: Mapping[str, Any] = {"seed": 0, "limit": 0, "batch": 32, "model": "lantern-emoji"}


def main(argv: Sequence[str] | None = None) -> int:
    """Take the figures."""
    return run_command(COMMAND, argv, prog="python -m lantern.eval.card")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add("--model", default=DEFAULTS["model"], help="name, folder or hub id of the model")
    add("--data", type=existing, required=True, help="folder that `lantern train data` wrote")
    add("--packages", type=existing, required=True, help="folder of the judging network's wheel")
    add("--prompts", type=Path, default=HERE.parent / "assets" / "prompts", help="folder of the evaluation prompts")
    add("--only", nargs="+", metavar="FIGURE", help=f"take these alone, of {', '.join(NAMES)}; others stay as they are")
    add(
        "--limit",
        type=integer(0, 10**6),
        default=DEFAULTS["limit"],
        help="measure at most so many of each set, 0 for all",
    )
    add("--batch", type=integer(1, 4096), default=DEFAULTS["batch"], help="pictures made at a time")
    add("--guidance", type=real(0, 1000), help="instead of the model's own")
    add("--temperature", type=real(0, 100), help="instead of the model's own")
    add("--top-k", type=integer(0, 2**31 - 1), help="instead of the model's own")
    add("--top-p", type=real(0, 1), help="instead of the model's own")
    add("--seed", type=integer(0, 2**63 - 1), default=DEFAULTS["seed"], help="of the noise and of every choice by lot")
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--device", default="auto", help="cpu, cuda or auto")
    add(
        "--recognised",
        type=integer(0, 10**6),
        help="on how many pictures of the contact sheet a person sees the prompt",
    )
    add("--out", type=Path, default=HERE / "results", help=f"folder of {RESULTS_NAME}")
    add("--card", type=Path, help=f"folder of {README_NAME} and the sheets; the model's own by default")


def run(args: argparse.Namespace) -> int:
    """Take each figure and write it down at once, so that a stopped run keeps what it has."""
    names = check_names(args.only)
    import torch

    from lantern.eval.figures import FIGURES
    from lantern.eval.size import component_sizes, weight_hashes
    from lantern.io import resolve_model

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    home = args.card or folder
    card = read_card(args.out / RESULTS_NAME, weights=weight_hashes(folder))
    card["torch"] = torch.__version__.partition("+")[0]
    write(card, args.out, home)
    study = open_study(args, home) if set(names) - {"size"} else None
    for name in names:
        sizes: dict[str, Any] = {"components": component_sizes(folder)}
        figure = FIGURES[name](study) if study and name in FIGURES else sizes
        if name == "sheet":
            figure["recognised"] = recognised(figure, card["figures"].get(name, {}), args.recognised)
        card["figures"][name] = {"command": command_line(args, name)} | figure
        card["figures"] = {known: card["figures"][known] for known in NAMES if known in card["figures"]}
        write(card, args.out, home)
        print(f"{name}: written to {args.out / RESULTS_NAME}", file=sys.stderr)
    return DONE


def check_names(only: Sequence[str] | None) -> list[str]:
    """The figures to take, in the order of the card; ValueError for a name that is none."""
    for name in only or ():
        if name not in NAMES:
            hint = nearest(name, NAMES) or f"; known are {', '.join(NAMES)}"
            raise ValueError(f"--only {name[:40]!r} is no figure{hint}")
    return [name for name in NAMES if not only or name in only]


def open_study(args: argparse.Namespace, home: Path) -> "Study":
    """Load what the figures are taken of."""
    from lantern.eval.study import Study
    from lantern.model_folder import load_model
    from lantern.training.data import Prepared

    model = load_model(args.model, device=args.device, dtype="fp32", parts=("vq", "text"))
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
    """The card that a folder holds; without figures where there is none yet or where it is of other weights."""
    empty: dict[str, Any] = {"weights": dict(weights), "torch": "", "figures": {}}
    if not path.is_file():
        return empty
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete it") from error
    if not isinstance(card, dict) or not isinstance(card.get("figures"), dict):
        raise ValueError(f"{path} is no card of figures: delete it")
    if card.get("weights") != dict(weights):
        if card["figures"]:
            print(f"{path} is of other weights: its figures are dropped", file=sys.stderr)
        return empty
    return card


def recognised(figure: Mapping[str, Any], before: Mapping[str, Any], given: int | None) -> int | None:
    """How many pictures a person recognised: as given, or as counted before on the very same pictures."""
    if given is not None and given > figure["prompts"]:
        raise ValueError(f"--recognised is {given}, but the contact sheet has {figure['prompts']} pictures")
    is_same = before.get("codes_sha256") == figure["codes_sha256"]
    return given if given is not None else before.get("recognised") if is_same else None


def write(card: Mapping[str, Any], out: Path, home: Path) -> None:
    """Write the JSON, and the table into the card if the folder has one."""
    from lantern.eval.table import insert, render
    from lantern.io import atomic_write, write_json

    write_json(out / RESULTS_NAME, card)
    readme = home / README_NAME
    if readme.is_file():
        text = insert(readme.read_text(encoding="utf-8"), render(card))
        with atomic_write(readme) as temporary:
            temporary.write_text(text, encoding="utf-8")


def command_line(args: argparse.Namespace, name: str) -> str:
    """The command that takes one figure again; of a folder elsewhere only the name is told."""
    words = ["python -m lantern.eval.card", "--only", name]
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
    """A path below the working folder as it is from there, another by its last part alone."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.name


COMMAND = Command("card", "Take the figures of a model card.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
