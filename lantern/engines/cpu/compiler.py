"""Compile the C++ library: one file for each kind of processor, chosen when it is loaded.

Needs the standard library only, since the build of a wheel runs it (hatch_build.py) before anything is installed.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABI = 11  # as `lantern_abi` of steps.cpp
# the first includes the others
NAMES = (
    "steps.cpp convolution.h draft.h rejection.h images.h noise.h mixture.h sampling.h pass.cpp tiles.h thread_policy.h"
)
SOURCES = [Path(__file__).with_name(name) for name in NAMES.split()]
# No contraction: fused multiply-adds are written out, or results would depend on the size of a tile. -O3 was measured
# to make the same passes in the same time.
FLAGS = ("-O2", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")
LINKED = ("-static-libstdc++", "-static-libgcc")  # so that a library loads where an older compiler is installed


@dataclass(frozen=True)
class ProcessorKind:
    """A kind of processor: the features that it has, in Linux's names, and the compiler's options for it."""

    name: str
    features: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()

    def extended(self, name: str, features: str, options: str) -> "ProcessorKind":
        """Return a kind with more features."""
        return ProcessorKind(name, self.features | {*features.split()}, (*self.options, *options.split()))


GENERIC = ProcessorKind("generic")
V3 = GENERIC.extended("v3", "avx2 fma f16c bmi1 bmi2 movbe", "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mmovbe")
V4 = V3.extended(
    "v4", "avx512f avx512bw avx512cd avx512dq avx512vl", "-mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl"
)
V4_BF16 = V4.extended("v4-bf16", "avx512_vnni avx512_bf16", "-mavx512vnni -mavx512bf16")
AMX = V4_BF16.extended("amx", "amx_tile amx_bf16 amx_int8", "-mamx-tile -mamx-bf16 -mamx-int8")
X86_64 = (AMX, V4_BF16, V4, V3)  # the best first


class CompilerError(Exception):
    """The library was not compiled; the message is the compiler's first error."""


def find_compiler() -> str | None:
    """Return the command of $CXX, or g++; None without either."""
    for name in (os.environ.get("CXX"), "g++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    return None


@cache
def facts() -> dict[str, str]:
    """Return what the system lists of the first processor, by name; nothing where it does not list any."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return {}
    lines = listing.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def features() -> frozenset[str]:
    """Return the features of this processor; none where the system does not list them."""
    return frozenset((facts().get("flags") or facts().get("Features", "")).split())


def supported() -> list[ProcessorKind]:
    """Return the variants that this processor runs, the best first."""
    return [*(variant for variant in X86_64 if variant.features <= features()), GENERIC]


def of_machine() -> tuple[ProcessorKind, ...]:
    """Return the variants for all processors of this machine's architecture."""
    return X86_64 if platform.machine().lower() in ("x86_64", "amd64") else (GENERIC,)


def library_name(variant: ProcessorKind) -> str:
    """Return the file name of the library of these sources and flags."""
    sources = [source.read_bytes() for source in SOURCES]
    parts = [*sources, " ".join((*FLAGS, *LINKED, *variant.options)).encode(), str(ABI).encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"cpu-{variant.name}-{digest[:16]}.so"


def record_of(path: Path) -> Path:
    """Return the file with checksum and ABI number of a library."""
    return path.with_suffix(".json")


def compile_library(compiler: str, variant: ProcessorKind, folder: Path) -> Path:
    """Compile a library and write its record; return its path. CompilerError if the compiler fails."""
    made = folder / library_name(variant)
    command = [compiler, *FLAGS, *LINKED, *variant.options, "-o", str(made), str(SOURCES[0])]
    run(command)
    record = {"abi": ABI, "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
    record_of(made).write_text(json.dumps(record), encoding="utf-8")
    return made


def run(command: list[str]) -> None:
    """Run a compiler; CompilerError with its first error if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except OSError as error:
        raise CompilerError(str(error)) from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        faults = [line.strip() for line in lines if "error" in line or "failed" in line]
        raise CompilerError([*faults, f"exit status {error.returncode}"][0]) from error


def compile_all(
    folder: Path, variants: Iterable[ProcessorKind], known: Collection[str] = ()
) -> tuple[list[Path], list[str]]:
    """Compile variants side by side, except `known` file names; return libraries, and the errors of the others.

    Without a compiler, and on systems other than Linux, there are none, and the reason is the only error.
    """
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        return [], ["no C++ compiler was found" if compiler is None else f"{sys.platform} is not supported"]
    folder.mkdir(parents=True, exist_ok=True)
    made, errors = list[Path](), list[str]()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        tasks = {
            variant.name: pool.submit(compile_library, compiler, variant, folder)
            for variant in variants
            if library_name(variant) not in known
        }
        for name, task in tasks.items():
            try:
                made.append(task.result())
            except CompilerError as error:
                errors.append(f"{name}: {error}")
    return made, errors
