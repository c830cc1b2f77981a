"""Everything that the golden test takes from the package, in one place.

A change of internal names needs a change of this file only.
"""

import atexit
import dataclasses
import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lantern import LanternPipeline
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.engine import EagerEngine
from lantern.methods import METHODS
from tests import tiny_folder
from tests.tiny import one_thread

EMBEDDED = "lantern-emoji"
TOY = "toy"
PROMPTS = ["a red apple", "a blue cat"]
SEED = 7
# fused passes want widths that are multiples of a panel
TOY_SHAPE: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}
TOY_NEIGHBOURS = 10
# of fused passes; the first would choose its window by a measurement of time
WINDOWS, WINDOW = ("gumbel-jacobi", "bounded-window"), 2
ENGINES = {"eager": EagerEngine(), "fused": CpuEngine()}


def methods() -> list[str]:
    return [name for name in METHODS if name != "auto"]


def embedded_methods() -> list[str]:
    """Returns the methods with trained parts of their own, except published settings, and one without."""
    own = [name for name in methods() if {*METHODS[name].made.needs} - {"eagle1"}]
    return ["bounded", *(name for name in own if not name.endswith("-paper"))]


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def decode(model: str, engine: str, method: str) -> list[dict[str, Any]]:
    pipe: Any = _pipeline(model)
    pipe.engine = ENGINES[engine]
    settings: dict[str, Any] = {"k": TOY_NEIGHBOURS} if model == TOY and "k" in METHODS[method].settings else {}
    if method == "lantern":
        settings["tree"] = "grown_8_2"  # whose nodes have siblings
    if engine == "fused" and method in WINDOWS:
        settings["window"] = WINDOW
    with one_thread():
        made: Any = pipe(PROMPTS, method=method, settings=settings, generator=SEED, output_type="latent")
    return [_record(tokens, stats) for tokens, stats in zip(made.tokens, made.stats, strict=True)]


def _record(tokens: torch.Tensor, stats: dict[str, Any]) -> dict[str, Any]:
    """Returns the digest of the tokens as little-endian int64, and what of the statistics no time or engine enters."""
    digest = hashlib.sha256(tokens.cpu().to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()
    left_out = ("seconds", "latency", "tokens_sha256", "method_reason", "promise", "total_variation_excess")
    return {"tokens_sha256": digest} | {name: stats[name] for name in stats if name not in left_out}


@cache
def _pipeline(model: str) -> LanternPipeline:
    """Loads a model; once, since all cases of a process share it."""
    pipe = LanternPipeline.from_pretrained(EMBEDDED if model == EMBEDDED else toy_folder())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@cache
def toy_folder() -> Path:
    """Writes the toy model to a folder that lasts until the process ends, since parts are read at their first use."""
    holder = tempfile.TemporaryDirectory(prefix="lantern-golden-")
    atexit.register(holder.cleanup)
    vq = dataclasses.replace(tiny_folder.VQ, codebook_size=TOY_SHAPE["vocab_size"])
    with patch.object(tiny_folder, "VQ", vq):
        return tiny_folder.save_tiny_model(Path(holder.name) / TOY, **TOY_SHAPE)
