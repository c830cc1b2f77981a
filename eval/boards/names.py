"""`python -m lantern.eval.boards.names`: write the names of the trained concepts whose images are recognised.

An image is recognised if its own concept is among the five nearest in the features of the retrieval network. The seeds
differ from the card's, so that the card measures the chosen names on images that did not choose them.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import DONE, Command, existing, integer, real, run_command
from lantern.eval.boards.card import DEFAULTS, EVAL

if TYPE_CHECKING:
    from lantern.eval.boards.study import Study

RECOGNISED = "recognised.txt"  # `lantern.models.folder` has it too, but loads torch
NEAREST = 5  # as the card's top-5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(NAMES, argv, prog="python -m lantern.eval.boards.names")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--model", default=DEFAULTS["model"], help="name, folder or hub id of the model")
    add("--data", type=existing, required=True, help="folder written by `lantern train data`")
    add("--packages", type=existing, required=True, help="folder with the wheel of the retrieval network")
    add("--out", type=Path, metavar="FILE", help=f"file to write, one name a line (default: the model's {RECOGNISED})")
    add("--images", type=integer(1, 1000), default=5, metavar="N", help="images of each name, of seeds 1 to N (5)")
    add("--share", type=real(0, 1), default=0.5, help="smallest share of recognised images (default 0.5)")
    add("--batch", type=integer(1, 4096), default=DEFAULTS["batch"], help="images made at a time (default 32)")
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--device", default="auto", help="cpu, cuda or auto")


def run(args: argparse.Namespace) -> int:
    """Measure the names, write those that are recognised, and print how many they are; ValueError if none is."""
    import torch

    from lantern.core.io import resolve_model
    from lantern.eval.boards.study import Study
    from lantern.models.folder import RECOGNISED_NAME, load_model, write_names
    from lantern.training.data import Prepared

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    out = args.out or folder / RECOGNISED_NAME
    model = load_model(args.model, device=args.device, dtype="fp32", engine="eager", parts=("vq", "text"))
    study = Study(
        model=model,
        prepared=Prepared.open(args.data),
        packages=args.packages,
        prompts=EVAL.parent / "assets" / "prompts",
        pictures=out.parent,
        sampling=model.sampling(),
        batch=args.batch,
    )
    shares = recognised_shares(study, seeds=range(1, args.images + 1))
    chosen = [name for name, share in shares.items() if share >= args.share]
    if not chosen:
        raise ValueError(f"no name reaches --share {args.share:g}: give a smaller one")
    write_names(out, chosen)
    print(f"{out}: {len(chosen)} of {len(shares)} names", file=sys.stderr)
    return DONE


def recognised_shares(study: "Study", *, seeds: Sequence[int]) -> dict[str, float]:
    """Return the share of recognised images of each trained concept, one image a seed, in alphabetical order."""
    import torch

    from lantern.eval.metrics.retrieval import ranks

    gallery, prompts = study.gallery, study.trained_prompts()
    labels = torch.tensor([gallery.label(concept) for concept in prompts.concepts])
    hits = torch.zeros(len(labels))
    for seed in seeds:
        painted = dataclasses.replace(study, seed=seed).paint(prompts)
        hits += (ranks(gallery.similarity(study.features(painted.pictures)), labels) < NEAREST).float()
    return dict(sorted(zip(prompts.concepts, (hits / len(seeds)).tolist(), strict=True)))


NAMES = Command("names", "Write the names of the trained concepts whose images are recognised.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
