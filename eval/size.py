"""How large a model is: parameters and bytes of each component, read from the headers of its files."""

import hashlib
import math
from pathlib import Path
from typing import Any

from lantern.io import WEIGHTS_NAME

MEASURED = ("transformer", "vqvae", "text_encoder")  # the components that the figures of a card depend on


def component_sizes(folder: Path) -> dict[str, dict[str, Any]]:
    """Parameters and bytes of every component folder that holds weights."""
    found = {path.parent.name: path for path in sorted(folder.glob(f"*/{WEIGHTS_NAME}"))}
    return {
        name: {"parameters": count_parameters(path), "bytes": bytes_of_weights(path.parent)}
        for name, path in found.items()
    }


def bytes_of_weights(folder: Path) -> int:
    """Bytes of everything in safetensors, tables beside the weights included."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def count_parameters(path: Path) -> int:
    """Numbers in a safetensors file; the scales of int8 rows are no parameters of their own."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith(".scale")]  # noqa: SIM118 - no mapping
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def weight_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights that the figures depend on; ValueError names a file that is missing."""
    hashes = {}
    for name in MEASURED:
        path = folder / name / WEIGHTS_NAME
        if not path.is_file():
            raise ValueError(f"{path} is missing: a card is made of a model with {', '.join(MEASURED)}")
        hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes
