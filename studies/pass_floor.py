"""`python -m studies.pass_floor`: bytes that a pass of LlamaGen's sizes must read, and the time that this takes.

Backs the table of predictions in docs/speed.md. Weights are counted in bf16 without embedding tables, keys and values
for both guidance rows and half of the image's codes. Nothing is allocated and nothing is measured.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from lantern.cli.bench import SHAPES
from lantern.cli.command import DONE, Command, integer, one_of, real, run_command
from lantern.eval.speed.bench_table import aligned
from lantern.eval.speed.phases import pass_bytes
from lantern.models.llamagen.transformer import Transformer, TransformerConfig

ROWS = 2  # of a picture under guidance


def gigabytes(shape: str, codes: int) -> tuple[float, float]:
    """Return the gigabytes of weights, and of keys and values, that a pass over one code reads."""
    config = TransformerConfig.named(shape, model_type="t2i", cls_token_num=120, block_size=codes)
    with torch.device("meta"):
        target = Transformer(config).to(torch.bfloat16)
    weights = pass_bytes(target, rows=0)
    return weights / 1e9, (pass_bytes(target, rows=ROWS, cached=codes // 2) - weights) / 1e9


def table(shapes: Sequence[str], codes: Sequence[int], bandwidths: Sequence[float]) -> list[str]:
    """Return aligned lines: gigabytes, and milliseconds at bandwidths in TB/s."""
    lines = [("shape", "codes", "weights GB", "cache GB", *(f"ms at {speed:g} TB/s" for speed in bandwidths))]
    for shape in shapes:
        for count in codes:
            weights, cache = gigabytes(shape, count)
            spent = [f"{(weights + cache) / speed:.2f}" for speed in bandwidths]
            lines.append((shape, str(count), f"{weights:.3f}", f"{cache:.3f}", *spent))
    return aligned(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    shapes = ("B", "L", "XL", "XXL", "3B")
    parser.add_argument("--shape", nargs="+", type=one_of(SHAPES), default=shapes, help="sizes (default B L XL XXL 3B)")
    parser.add_argument("--codes", nargs="+", type=integer(4, 65536), default=[256, 1024], help="default 256 1024")
    parser.add_argument("--tbps", nargs="+", type=real(0.001, 1000), default=[1.0, 2.0, 3.0], help="default 1 2 3")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    print("\n".join(table(args.shape, args.codes, args.tbps)))
    return DONE


COMMAND = Command("pass_floor", "Print the bytes that a pass must read.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.pass_floor"))
