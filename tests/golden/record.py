"""The golden records of each kind of machine; `python -m tests.golden.record [PART ...]` writes those of this one.

With arguments, only cases whose names contain one of them are recorded, such as `toy-eager` or `-lantern++`. Other
records are kept.
"""

import atexit
import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
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
NAMES = [name for name in METHODS if name != "auto"]
# of fused passes; the first would choose its window by a measurement of time
WINDOWS, WINDOW = ("gumbel-jacobi", "bounded-window"), 2
ENGINES = {"eager": EagerEngine(), "fused": CpuEngine()}
FILE = Path(__file__).with_name("records.json")
COMMAND = "python -m tests.golden.record"
# methods of the embedded model by fused passes
FUSED = ("plain", "eagle1", "gumbel-jacobi", "bounded-window")
# Besides eager passes of the toy model, these run by default: fused steps, drafters and relaxations.
QUICK = ("lantern-emoji-fused-gumbel-jacobi", "toy-fused-plain", "toy-fused-gumbel-jacobi", "toy-fused-bounded-window")
QUICK += ("toy-fused-eagle1", "toy-fused-bounded", "toy-fused-sjd")
# methods that are not recorded by fused passes of the toy model: there are their likes
REPEATED = ("eagle2-rejection", "ddd", "svip", "c2t", "radar", "adt-tree", "grouped", "tolerance", "vadusa")
REPEATED += tuple(name for name in NAMES if name.endswith("-paper"))

# those with trained parts of their own, except published settings
TRAINED = [name for name in NAMES if {*METHODS[name].made.needs} - {"eagle1"} and not name.endswith("-paper")]


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


class Case(NamedTuple):
    model: str
    engine: str
    method: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def is_slow(self) -> bool:
        """Whether the default run leaves it out."""
        is_setting = self.method.endswith("-released")
        return is_setting or ((self.model, self.engine) != (TOY, "eager") and str(self) not in QUICK)


def cases() -> list[Case]:
    toy = [Case(TOY, "eager", name) for name in NAMES]
    toy += [Case(TOY, "fused", name) for name in NAMES if name not in REPEATED]
    fused = [Case(EMBEDDED, "fused", name) for name in FUSED]
    eager = [Case(EMBEDDED, "eager", name) for name in ("bounded", *TRAINED)]
    return toy + fused + eager


SAME_BITS = {"2.14": "2.13"}  # versions of torch that give the records of another one


def key() -> str:
    """Returns what bits depend on: the kind of processor and the version of torch."""
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{torch.backends.cpu.get_cpu_capability()} torch {SAME_BITS.get(version, version)}"


def read() -> dict[str, dict[str, list[dict[str, Any]]]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def write(records: dict[str, Any]) -> None:
    """Writes the records, one image a line."""
    parts = []
    for name, entries in sorted(records.items()):
        lines = [
            f"  {json.dumps(case)}: [\n   " + ",\n   ".join(json.dumps(one) for one in pictures) + "\n  ]"
            for case, pictures in sorted(entries.items())
        ]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main(wanted: list[str]) -> None:
    known = {str(case) for case in cases()}
    records = read()
    mine = {name: entry for name, entry in records.get(key(), {}).items() if name in known}
    for case in cases():
        if wanted and not any(part in str(case) for part in wanted):
            continue
        begun = time.perf_counter()
        mine[str(case)] = decode(*case)
        write(records | {key(): mine})
        print(f"{case}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
