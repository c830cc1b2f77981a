"""`lantern convert CHECKPOINT OUT`: a released checkpoint becomes a self-describing component folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lantern.cli.command import DONE, Command, run_command
from lantern.cli.values import existing, integer, one_of

KINDS = ("t2i", "c2i", "vq", "drafter")
DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    return run_command(COMMAND, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument(
        "checkpoint",
        type=existing,
        metavar="CHECKPOINT",
        help="a .pt, .bin or .safetensors file, or a folder with config.json and weights",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for config.json and model.safetensors")
    parser.add_argument("--kind", type=one_of(KINDS), help=f"what it must be: {', '.join(KINDS)}")
    parser.add_argument("--config", type=existing, metavar="JSON", help="fields that the file cannot tell")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--image-size", type=integer(16, 4096), metavar="PIXELS", help="picture side, 16 pixels a code")
    size.add_argument("--grid", type=integer(1, 256), metavar="CODES", help="codes along one side of the picture")
    parser.add_argument("--ema", action="store_true", help="take the moving average where the file has one")
    parser.add_argument("--dtype", type=one_of(list(DTYPES)), default="keep", help="keep (default), bf16, fp16 or fp32")
    parser.add_argument("--force", action="store_true", help="replace a component that is already in OUT")


def run(args: argparse.Namespace) -> int:
    """Read, check and write; say what it was."""
    if args.image_size is not None and args.image_size % 16:
        raise ValueError(f"--image-size is {args.image_size}, wanted a multiple of 16; --grid takes the codes directly")
    import torch

    from lantern.config import read_json_object
    from lantern.io import WEIGHTS_NAME, save_component
    from lantern.models.llamagen.checkpoint import read_checkpoint

    if (args.out / WEIGHTS_NAME).exists() and not args.force:
        raise ValueError(f"{args.out} already holds a component; --force replaces it")
    grid = args.grid or (args.image_size // 16 if args.image_size else 0)
    found = read_checkpoint(
        args.checkpoint,
        kind=args.kind,
        config=read_json_object(args.config) if args.config else None,
        block_size=grid**2 or None,
        prefers_ema=args.ema,
    )
    name = DTYPES[args.dtype]
    save_component(found.state, found.config, args.out, dtype=getattr(torch, name) if name else None)
    numbers = sum(tensor.numel() for tensor in found.state.values())
    print(f"{args.out}: {found.kind}, {len(found.state)} tensors, {numbers:,} numbers")
    return DONE


COMMAND = Command("convert", "Turn a released checkpoint into a folder that loads here.", add_arguments, run)
