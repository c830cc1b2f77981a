"""Options that are common to the commands which measure methods on one model, and the folder of results."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lantern.cli.argument_types import integer, one_of, real

DTYPES = ("fp32", "bf16", "fp16")
PLAIN_KINDS = (
    *("eager", "compile", "fused", "fused+compile", "fused+int8", "fused+int8+compile"),
    *("graph", "graph+compile", "int8", "int8+compile"),
)
DISTRIBUTION: dict[str, Callable[[str], Any]] = {
    "guidance": real(0, 1000),
    "temperature": real(0, 100),
    "top_k": integer(0, 10**6),
    "top_p": real(0, 1),
}


def add_distribution(group: Any, names: Sequence[str] = tuple(DISTRIBUTION)) -> None:
    """Add options for the fields of the model's sampling in `names`."""
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", type=DISTRIBUTION[name], help="default: the model's")


def distribution_of(args: argparse.Namespace, names: Sequence[str] = tuple(DISTRIBUTION)) -> dict[str, Any]:
    """Return the fields of the sampling that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_subject(group: Any, distribution: Sequence[str] = tuple(DISTRIBUTION)) -> None:
    """Add options for prompts, sampling and seed."""
    group.add_argument(
        "--prompts-file", metavar="FILE", help="prompts, one per line (default assets/prompts/concepts.txt)"
    )
    add_distribution(group, distribution)
    group.add_argument(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=0,
        help="seed of the noise and of the order of prompts (default 0)",
    )


def add_dtype(group: Any) -> None:
    """Add the option for the dtype of methods."""
    group.add_argument("--dtype", type=one_of(DTYPES), default="fp32", help="of methods: fp32 (default), bf16 or fp16")


def add_machine(group: Any) -> None:
    """Add options for threads, device and progress."""
    group.add_argument("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--quiet", action="store_true", help="print no progress")


def baseline_dtypes(dtype: str) -> tuple[str, str]:
    """Return the dtypes of plain decoding for methods of a dtype."""
    return ("fp32", "bf16") if dtype != "fp16" else ("fp32", "fp16")


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts in an order given by the seed, so that a longer run extends a shorter one."""
    import torch

    from lantern.generation.requests import read_prompts

    path = args.prompts_file or results_folder().parents[1] / "assets" / "prompts" / "concepts.txt"
    prompts = read_prompts(str(path))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(args.seed % 2**32))
    return [prompts[i] for i in order.tolist()]


def report(path: Path, is_quiet: bool) -> None:
    """Print the path of a written file."""
    if not is_quiet:
        print(path, file=sys.stderr)


def results_folder() -> Path:
    """Return the folder of results, beside the code of the evaluation."""
    from lantern.eval.boards import frontier

    return Path(frontier.__file__).parents[1] / "results"
