"""`python -m studies.pass_profile`: time of a fused pass by part, and its growth with the number of nodes.

Backs the table of a pass in docs/engines.md (eval/results/pass_profile.json and pass_profile_int8.json). Passes over
windows of n codes after half of an image, interleaved over n. Parts are those of the first thread: norms, linear
layers (qkv, out, gate, down, head), attention, and waiting for the other threads; the rest is before and after them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lantern.cli.bench import SHAPES
from lantern.cli.command import DONE, Command, integer, one_of, run_command
from lantern.core.io import write_json
from lantern.decoding.cache import StaticCache
from lantern.engines.cpu import compiler
from lantern.engines.cpu.engine import CpuTarget
from lantern.engines.cpu.kernels import PARTS
from lantern.eval.speed.race import interleave
from lantern.eval.speed.shapes import ShapeOptions, random_model
from lantern.eval.speed.surroundings import about, load_average, surroundings
from lantern.models.folder import DTYPES, load_model

RESULTS = Path(__file__).resolve().parents[1] / "eval" / "results" / "pass_profile.json"
PASSES = 10  # per round
KINDS = {kind.name: kind for kind in compiler.X86_64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="lantern-emoji", help="name, folder or hub id of the model")
    parser.add_argument("--shape", type=one_of(SHAPES), help="size of LlamaGen with random weights, instead of a model")
    parser.add_argument("--dtype", type=one_of(("bf16", "fp32")), default="bf16", help="bf16 (default) or fp32")
    parser.add_argument("--int8", action="store_true", help="8-bit weights")
    parser.add_argument("--nodes", type=integer(1, 128), nargs="+", default=[1, 2, 4, 8, 16], help="codes of a pass")
    parser.add_argument("--rounds", type=integer(1, 10**4), default=50, help=f"of {PASSES} passes each (default 50)")
    parser.add_argument("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    parser.add_argument("--library", choices=tuple(KINDS), help="library of an older kind of processor")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")


def run(args: argparse.Namespace) -> int:
    """Print the microseconds of every part and write them."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    before = load_average()
    if args.library is not None:
        compiler.features = lambda: KINDS[args.library].features
    if args.shape is None:
        model = load_model(args.model, device="cpu", dtype=args.dtype, parts=(), engine="eager")
    else:
        config = ShapeOptions(shape=args.shape).config
        model = random_model(config, "eagle1", torch.device("cpu"), DTYPES[args.dtype])
    target: Any = model.target
    if args.int8:
        from lantern.engines.prepared import quantized

        target = quantized(target, 8)
    target = CpuTarget(target)
    rows = profile(target, sorted({*args.nodes}), args.rounds)
    print(" ".join(f"{name:>9}" for name in ("nodes", "pass", *PARTS, "rest")))
    for row in rows:
        print(" ".join(f"{value:9.0f}" for value in (row["nodes"], row["us"], *row["parts"].values())))
    options = {name: getattr(args, name) for name in ("dtype", "int8", "library")}
    shape = {"model": args.shape, "surroundings": surroundings(model.device)}
    found = (about(model) if args.shape is None else shape) | options
    write_json(args.out, found | {"load_average": {"begin": before, "end": load_average()}, "rows": rows})
    return DONE


@torch.no_grad()
def profile(target: Any, nodes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a fused target's pass over n nodes and of its parts: medians over rounds, the first left out."""
    passes, fused = [windows(target, n) for n in nodes], target.program
    fused.spent = torch.zeros(torch.get_num_threads(), len(PARTS), dtype=torch.float64)

    def parts_of(make: Callable[[], object]) -> list[float]:
        fused.spent.zero_()
        for _ in range(PASSES):
            make()
        return (fused.spent[0] / PASSES * 1e6).tolist()

    seconds, found = interleave(
        [lambda _, make=make: parts_of(make) for make in passes], rounds + 1, device=torch.device("cpu")
    )
    fused.spent = None
    rows = []
    for n, of_n, parts in zip(nodes, seconds, found, strict=True):
        us = median(of_n[1:]) / PASSES * 1e6
        spent: dict[str, float] = dict(zip(PARTS, map(median, zip(*parts[1:], strict=True)), strict=True))
        spent["rest"] = us - sum(spent.values())
        rows.append({"nodes": n, "us": round(us, 1), "parts": {name: round(value, 1) for name, value in spent.items()}})
    return rows


def windows(target: Any, nodes: int) -> Callable[[], object]:
    """Return a pass over a window of random inputs, for two rows with half of the codes in the cache."""
    config = target.config
    known = config.block_size // 2
    cache = StaticCache(
        layers=config.n_layer,
        images=1,
        rows=2,
        heads=config.n_head,
        head_dim=config.head_dim,
        prefix=1,
        codes=config.block_size,
        stage=nodes,
        dtype=torch.float32,
        device="cpu",
    )
    noise = torch.Generator().manual_seed(0)
    cache.buffer.normal_(generator=noise)
    mask = torch.full((2, nodes, cache.slots), -torch.inf)
    mask[..., : 1 + known] = 0.0
    mask[..., cache.first_stage_slot :] = torch.full((nodes, nodes), -torch.inf).triu(1)
    inputs = torch.randn(2, nodes, config.dim, generator=noise)
    positions = torch.arange(nodes).expand(2, -1) + known + config.cls_token_num
    slots = (torch.arange(nodes) + cache.first_stage_slot).expand(2, -1)
    return lambda: target.program(inputs, positions, mask, cache=cache, slots=slots)


COMMAND = Command("pass_profile", "Measure the time of a fused pass by part.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.pass_profile"))
