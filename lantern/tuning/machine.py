"""Which machine this is, as far as decoding times depend on it."""

import platform
from pathlib import Path
from typing import Any

import torch

from lantern.catalog import Engine
from lantern.model_folder import DTYPES, Model


def describe_machine(model: Model) -> dict[str, Any]:
    """The device's kind and name, threads, the model's dtype, how its passes are run, and torch's version."""
    is_cuda = model.device.type == "cuda"
    return {
        "device": model.device.type,
        "name": torch.cuda.get_device_name(model.device) if is_cuda else processor(),
        "threads": torch.get_num_threads(),
        "dtype": next((name for name, dtype in DTYPES.items() if dtype == model.dtype), str(model.dtype)),
        "passes": passes(model.engine),
        "torch": torch.__version__,
    }


def passes(engine: Engine) -> str:
    """How passes are run, in words; what is reproducible as it is is not called so."""
    words = {
        "fused": engine.fused,
        "compiled": engine.compile,
        "graphed": engine.graphs,
        "reproducible": engine.reproducible and not engine.fused,
        "in 4 bits": engine.int4,
        "in 8 bits": engine.int8,
    }
    return ", ".join(word for word, holds in words.items() if holds) or "as torch runs them"


def processor() -> str:
    """The processor's name; where the system does not tell it, the architecture's."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
