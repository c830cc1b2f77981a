"""`lantern convert CHECKPOINT OUT`: converts a released checkpoint to a component folder with its own config."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import DONE, Command, dtype_of_names, existing, integer, one_of, run_command

if TYPE_CHECKING:
    import torch

    from lantern.models.llamagen.checkpoint import Checkpoint


KINDS = ("t2i", "c2i", "vq", "drafter")
DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    return run_command(COMMAND, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "checkpoint",
        type=existing,
        metavar="CHECKPOINT",
        help="a .pt, .bin or .safetensors file, or a folder with config.json and weights",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for config.json and model.safetensors")
    parser.add_argument("--kind", type=one_of(KINDS), help=f"expected kind: {', '.join(KINDS)}")
    parser.add_argument(
        "--config", type=existing, metavar="JSON", help="config fields that the checkpoint does not determine"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--image-size", type=integer(16, 4096), metavar="PIXELS", help="side of the picture, 16 pixels per code"
    )
    size.add_argument("--grid", type=integer(1, 256), metavar="CODES", help="codes along one side of the picture")
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights if the file has one")
    parser.add_argument(
        "--dtype", type=dtype_of_names("keep"), default="keep", help="keep (default), bf16, fp16 or fp32"
    )
    parser.add_argument(
        "--overwrite", "--force", dest="force", action="store_true", help="replace an existing component in OUT"
    )


def run(args: argparse.Namespace) -> int:
    """Read, check, write, and print what was converted."""
    if args.image_size is not None and args.image_size % 16:
        raise ValueError(
            f"--image-size is {args.image_size}, wanted a multiple of 16; or give the codes of a side with --grid"
        )
    import torch

    from lantern.core.config import read_json_object
    from lantern.core.io import WEIGHTS_NAME
    from lantern.models.llamagen.checkpoint import read_checkpoint

    if (args.out / WEIGHTS_NAME).exists() and not args.force:
        raise ValueError(f"{args.out} already holds a component: replace it with --overwrite")
    grid = args.grid or (args.image_size // 16 if args.image_size else 0)
    found = read_checkpoint(
        args.checkpoint,
        kind=args.kind,
        config=read_json_object(args.config) if args.config else None,
        block_size=grid**2 or None,
        prefers_ema=args.ema,
    )
    name = DTYPES[args.dtype]
    write_checked(found, args.out, dtype=getattr(torch, name) if name else None)
    numbers = sum(tensor.numel() for tensor in found.state.values())
    print(f"{args.out}: {found.kind}, {len(found.state)} tensors, {numbers:,} values")
    return DONE


def write_checked(found: "Checkpoint", out: Path, *, dtype: "torch.dtype | None") -> None:
    """Write a component and run it once; only a component that loads and computes takes its place in `out`."""
    import shutil
    import tempfile

    from lantern.core.io import CONFIG_NAME, SUMS_NAME, WEIGHTS_NAME, save_component
    from lantern.models.trial import try_component

    parents = [parent for parent in (out, *out.parents) if not parent.exists()]
    out.mkdir(parents=True, exist_ok=True)
    trial = Path(tempfile.mkdtemp(prefix=".convert-", dir=out))
    try:
        save_component(found.state, found.config, trial, dtype=dtype)
        try_component(trial, found.kind if found.kind in ("vq", "drafter") else "target")
        for name in (SUMS_NAME, CONFIG_NAME, WEIGHTS_NAME):
            (trial / name).replace(out / name)
    except BaseException as error:
        shutil.rmtree(trial, ignore_errors=True)
        for folder in parents:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, ValueError | OSError):
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(str(error).replace(str(trial), str(out))) from error
        raise
    trial.rmdir()


COMMAND = Command("convert", "Convert a released checkpoint to a component folder.", add_arguments, run)
