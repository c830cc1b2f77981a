"""`python -m studies.vq_decoding`: seconds of decoding codes to pixels, by the C++ decoder and by torch's.

Backs the figures of VQ decoding in docs/engines.md. The decoders of lantern-emoji and of LlamaGen's VQ-16 (random
weights, 256 x 256 and 512 x 512 pixels) run in fp32, interleaved: as the `cpu` engine packs them, and by torch with its
two layouts of memory. The speedup is over the faster one of torch.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern.cli.command import DONE, Command, integer, run_command
from lantern.core.io import write_json
from lantern.engines.cpu.vq import packed_vq
from lantern.eval.speed.race import Spread, interleave
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.models.folder import load_model
from lantern.models.llamagen.vqvae import VQVAE, VQConfig

CPU = torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(COMMAND, argv, prog="python -m studies.vq_decoding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--threads", type=integer(1, 1024), nargs="+", default=[1, 2], help="numbers of CPU threads")
    parser.add_argument(
        "--rounds",
        type=integer(3, 10**4),
        default=20,
        help="images by each decoder, a third of them at 512 pixels (default 20)",
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results")


def run(args: argparse.Namespace) -> int:
    """Print the seconds of every decoder and write them."""
    before, rows = load_average(), []
    print("decoder        threads  torch   channels last   packed (ms)   speedup")
    for name, (vq, side) in decoders().items():
        codes = torch.randint(vq.config.codebook_size, (1, side * side), generator=torch.Generator().manual_seed(0))
        for threads in args.threads:
            torch.set_num_threads(threads)
            rounds = args.rounds if side == 16 else -(-args.rounds // 3)
            row = {"decoder": name, "threads": threads, "rounds": rounds} | measure(vq, codes, rounds)
            shown = [f"{1e3 * row[kind]['median']:.1f}" for kind in ("torch", "channels_last", "packed")]
            print(f"{name:14} {threads:7}  {shown[0]:>6} {shown[1]:>14} {shown[2]:>13} {row['speedup']:>9.2f}")
            rows.append(row)
    if args.out is not None:
        found = {"rounds": args.rounds, "surroundings": surroundings(CPU)}
        write_json(args.out, found | {"load_average": {"begin": before, "end": load_average()}, "rows": rows})
    return DONE


def decoders() -> dict[str, tuple[VQVAE, int]]:
    """Return the tokenizers by name, with the rows of their images in codes."""
    emoji = load_model("lantern-emoji", device="cpu").vq
    assert isinstance(emoji, VQVAE)
    large = VQVAE(VQConfig()).eval()
    return {"lantern-emoji": (emoji.float(), 16), "VQ-16, 256 px": (large, 16), "VQ-16, 512 px": (large, 32)}


@torch.no_grad()
def measure(vq: VQVAE, codes: Tensor, rounds: int) -> dict[str, Any]:
    """Return median, p10 and p90 of the seconds of each decoder, and the speedup of the packed one."""
    last = copy.deepcopy(vq).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    kinds = {"torch": vq, "channels_last": last, "packed": packed_vq(vq)}
    runs: list[Callable[[int], Tensor]] = [lambda _, one=one: one.decode(codes) for one in kinds.values()]
    for work in runs:  # packs the weights
        work(0)
    seconds, _ = interleave(runs, rounds, device=CPU)
    spreads = {name: Spread.of(times) for name, times in zip(kinds, seconds, strict=True)}
    speedup = min(spreads["torch"].median, spreads["channels_last"].median) / spreads["packed"].median
    return {name: spread.as_dict() for name, spread in spreads.items()} | {"speedup": round(speedup, 3)}


COMMAND = Command("vq_decoding", "Measure the time of decoding codes to pixels.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
