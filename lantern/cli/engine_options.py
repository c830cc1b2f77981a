"""The options that choose an engine and the target's weights."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from lantern.engines.engine import ENGINES, WEIGHTS, Engine, engine, engine_from_flags

if TYPE_CHECKING:
    from lantern.models.folder import Model

# deprecated option -> keyword of `engine_from_flags`, and what replaces it
DEPRECATED = {
    "--fused": ("fused", "--engine cpu"),
    "--compile": ("compile", "--engine compile"),
    "--cuda-graphs": ("graphs", "--engine graph"),
    "--int8": ("int8", "--weights int8"),
    "--int4": ("int4", "--weights int4"),
}


def add_engine(group: Any, *, weights: str = "--weights", default: str = "auto") -> None:
    """Add the options to a parser or group; `weights` is the name of the option for the target's weights."""
    group.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="how passes are run: eager (by torch), compile (torch.compile: minutes at first), graph (one CUDA graph "
        "per step), cpu (C++, built with g++ at first use: several times as fast as eager, and exact methods give "
        "plain decoding's codes in bf16 too); auto: the fastest of them that is ready "
        f"(default {default})",
    )
    group.add_argument(
        weights,
        dest="target_weights",
        choices=("full", "bf16", *WEIGHTS[1:]),
        help="weights of the target: full (the model's own, default), bf16, int8 (layers, head and the cpu engine's "
        "drafters), int4 (layers); exact methods are exact with respect to the quantized target",
    )
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="bf16 on a CPU: exact methods give plain decoding's codes, with trees and windows of up to 16 codes",
    )
    for option in DEPRECATED:
        group.add_argument(option, action="store_true", help=argparse.SUPPRESS)


def engine_of(args: argparse.Namespace, *, default: str = "auto") -> Engine:
    """Return the engine that the options describe; warns of deprecated options on stderr."""
    old = {option: names for option, names in DEPRECATED.items() if getattr(args, _attribute(option), False)}
    if not old:
        weights = args.target_weights if args.target_weights in WEIGHTS else "full"
        return engine(args.engine or default, weights=weights, reproducible=args.reproducible)
    if args.engine is not None or args.target_weights is not None:
        raise ValueError(f"{', '.join(old)} cannot be combined with --engine and --weights: use only these two")
    flags = dict.fromkeys((name for name, _ in old.values()), True)
    if {"--fused", "--compile", "--cuda-graphs"} & set(old):
        chosen = engine_from_flags(**flags, reproducible=args.reproducible)
    else:
        chosen = engine(default, weights=engine_from_flags(**flags).weights, reproducible=args.reproducible)
    if not getattr(args, "quiet", False):
        instead = ", ".join(f"{option} is deprecated: use {new}" for option, (_, new) in old.items())
        print(f"lantern: {instead}", file=sys.stderr, flush=True)
    return chosen


def dtype_of(args: argparse.Namespace) -> str:
    """Return the dtype of --dtype and --weights; ValueError if they contradict each other."""
    if args.target_weights != "bf16":
        return args.dtype
    if args.dtype not in ("auto", "bf16"):
        raise ValueError(f"--weights bf16 contradicts --dtype {args.dtype}: give one of them")
    return "bf16"


def advice(model: "Model") -> str | None:
    """Return how to get a faster engine, if `auto` chose eager only because the C++ library is not built."""
    if model.device.type != "cpu" or model.engine.name != "eager" or not model.engine.reason:
        return None
    if engine("cpu", weights=model.engine.weights).available(model.target) is not None:
        return None
    return "`lantern doctor --build` or `--engine cpu` builds the C++ engine, which is several times as fast here"


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
