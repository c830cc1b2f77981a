"""What the commands that measure methods on one model have in common: options, and where results are told."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lantern.cli.values import integer, one_of, real

DTYPES = ("fp32", "bf16", "fp16")
PLAIN_KINDS = (
    *("eager", "compile", "fused", "fused+compile", "fused+int8", "fused+int8+compile"),
    *("graph", "graph+compile", "int8", "int8+compile"),
)
LAW: dict[str, Callable[[str], Any]] = {
    "guidance": real(0, 1000),
    "temperature": real(0, 100),
    "top_k": integer(0, 10**6),
    "top_p": real(0, 1),
}


def add_law(group: Any, names: Sequence[str] = tuple(LAW)) -> None:
    """Describe what of the model's sampling may be set, of LAW."""
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", type=LAW[name], help="instead of the model's own")


def law_of(args: argparse.Namespace, names: Sequence[str] = tuple(LAW)) -> dict[str, Any]:
    """What of it was set."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_subject(group: Any, law: Sequence[str] = tuple(LAW)) -> None:
    """Describe prompts, the law's `law`, and the seed."""
    group.add_argument(
        "--prompts-file", metavar="FILE", help="prompts, one a line (default assets/prompts/concepts.txt)"
    )
    add_law(group, law)
    group.add_argument(
        "--seed", type=integer(0, 2**63 - 1), default=0, help="of noise and choice of prompts (default 0)"
    )


def add_dtype(group: Any) -> None:
    """Describe the dtype of methods."""
    group.add_argument("--dtype", type=one_of(DTYPES), default="fp32", help="of methods: fp32 (default), bf16 or fp16")


def add_machine(group: Any) -> None:
    """Describe what is computed on, and whether it is told."""
    group.add_argument("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--quiet", action="store_true", help="no word of the progress")


def baseline_dtypes(dtype: str) -> tuple[str, str]:
    """What plain decoding runs in beside methods of a dtype."""
    return ("fp32", "bf16") if dtype != "fp16" else ("fp32", "fp16")


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts, shuffled by the seed, so that more pictures go on where fewer stopped."""
    import torch

    from lantern.prompts import read_prompts

    path = args.prompts_file or results_folder().parents[1] / "assets" / "prompts" / "concepts.txt"
    prompts = read_prompts(str(path))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(args.seed % 2**32))
    return [prompts[i] for i in order.tolist()]


def tell(path: Path, is_quiet: bool) -> None:
    """Say what was written."""
    if not is_quiet:
        print(path, file=sys.stderr)


def results_folder() -> Path:
    """Where results are kept: beside the code of the evaluation."""
    from lantern.eval import frontier

    return Path(frontier.__file__).parent / "results"
