"""Builds `turns.cpp`, with what it includes, for the processor at hand, once; the library stays in the user's cache."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from lantern.io import user_cache

# the first has the others in it
SOURCES = [
    Path(__file__).with_name(name) for name in ("turns.cpp", "relax.h", "draws.h", "pass.cpp", "tiles.h", "crew.h")
]
# no contraction: which products are fused with a sum is written out, or results would hang on the size of a tile
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fopenmp")


@cache
def library() -> ctypes.CDLL:
    """The built library; ValueError where no compiler is at hand or it fails."""
    compiler = find_compiler()
    # what the compiler knows of itself and of this processor
    known = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]).stdout
    sources = [source.read_bytes() for source in SOURCES]
    name = hashlib.sha256(b"\0".join([*sources, " ".join(FLAGS).encode(), known])).hexdigest()[:24]
    path = user_cache() / f"pass-{name}.so"
    if not path.is_file():
        _build(compiler, path)
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # it is built anew the next time
        raise ValueError(f"fused passes cannot be loaded ({error}): try again, or leave fused out") from error
    for name in ("pass", "linear", "turns", "draw", "relax"):
        call = getattr(found, f"lantern_{name}")
        call.restype, call.errcheck = ctypes.c_int64, _check
    return found


def has_matrix_units() -> bool:
    """Whether products in bf16 go by matrix units (AMX), which Linux lends; ValueError as for `library`."""
    return bool(library().lantern_has_tiles())


def _check(result: Any, call: object, given: object) -> Any:
    """What a call gave; MemoryError where it found no memory."""
    if result < 0:
        raise MemoryError("a fused pass found no memory for what it computes")
    return result


def find_compiler() -> str:
    """The command of $CXX, or g++; ValueError without either."""
    for name in (os.environ.get("CXX"), "g++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise ValueError(
        "fused passes are built at first use by g++ 9 or later, which was not found: install it, name it in CXX, or "
        "leave fused out"
    )


def _build(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=path.parent)
    except OSError as error:
        raise ValueError(f"fused passes cannot be built in {path.parent} ({error}): set XDG_CACHE_HOME") from error
    try:
        made = Path(folder) / path.name
        _run([compiler, *FLAGS, "-o", str(made), str(SOURCES[0])])
        made.replace(path)  # another process may have built the same
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is left there is never read


def _run(command: list[str]) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", b"") or str(error).encode()
        first = next((line for line in output.decode(errors="replace").splitlines() if "error" in line), str(error))
        raise ValueError(f"{command[0]} could not build fused passes ({first.strip()}): leave fused out") from error
