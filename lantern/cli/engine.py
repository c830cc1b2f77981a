"""How passes are run, as options of the commands that draw."""

import argparse
from typing import TYPE_CHECKING, Any

from lantern.catalog import EAGER, Engine

if TYPE_CHECKING:
    from lantern.model_folder import Model


def add_engine(group: Any) -> None:
    """Describe the options."""
    group.add_argument(
        "--compile", action="store_true", help="compile passes; minutes at first, then faster: for many pictures"
    )
    group.add_argument(
        "--fused",
        action="store_true",
        help="passes as one C++ program each, built at first use with g++ (CPU): several times as fast, and exact "
        "methods give plain decoding's picture in bf16 too",
    )
    group.add_argument("--cuda-graphs", action="store_true", help="a step, plain or drafted, as one CUDA graph")
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="bf16 on a CPU: exact methods give plain decoding's picture, with trees and windows of up to 16 codes",
    )
    group.add_argument(
        "--int4", action="store_true", help="4-bit weights in the target's layers: exact with respect to that target"
    )
    group.add_argument(
        "--int8",
        action="store_true",
        help="8-bit weights in the target's layers and head, and in fused drafters: exact with respect to that target",
    )


def engine_of(args: argparse.Namespace) -> Engine:
    """What was chosen."""
    chosen = {"compile": args.compile, "graphs": args.cuda_graphs, "reproducible": args.reproducible}
    return Engine(**chosen, int4=args.int4, int8=args.int8, fused=args.fused)


def advice(model: "Model") -> str | None:
    """What would make passes faster here, if it was not chosen and there is what it takes."""
    from lantern.kernels.build import find_compiler
    from lantern.kernels.fused import check

    if model.device.type != "cpu" or model.engine != EAGER:
        return None
    try:
        find_compiler()
        check(model.target)
    except ValueError:  # without a compiler, or with a model of other widths, there is nothing to advise
        return None
    return "--fused makes passes several times as fast here, after building them once"
