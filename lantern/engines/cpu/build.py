"""Compile, find and load the C++ library of the cpu engine: one file for each kind of processor.

A library comes with the installed package, or is compiled once and cached where the package has none for this
processor. Its name tells the sources and options that it was made of. It is loaded only if its checksum is that of its
record, and if both belong to who installed the package (a cached one: to the user) and others cannot write there.

Importing this module needs the standard library only, since the build of a wheel compiles by it (hatch_build.py) before
anything is installed.
"""

import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LOG = logging.getLogger("lantern")
PACKAGED = Path(__file__).with_name("lib")  # written by hatch_build.py
FUNCTIONS = ("pass", "linear", "steps", "sample", "convolution")  # with a status as result
WITH_AMX = ("split_convolution",)  # these too, if the processor has AMX
INSTEAD = "use --engine eager"
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


def find_compiler() -> str:
    """Return the command of $CXX, or g++; ValueError without either, and on systems other than Linux."""
    if sys.platform != "linux":
        raise ValueError(f"the cpu engine is for Linux, this is {sys.platform}: {INSTEAD}")
    for name in (os.environ.get("CXX"), "g++"):
        if name and (found := shutil.which(name)):
            return found
    raise ValueError(
        "the cpu engine is built by g++ 9 or later, which was not found: install it, or set CXX to its name, or "
        f"{INSTEAD}"
    )


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


def check_processor() -> None:
    """Raise ValueError for an x86-64 processor without AVX2 and FMA, on which torch's layers are faster."""
    if supported()[0] not in of_machine():
        raise ValueError(f"the cpu engine computes with AVX2 and FMA, which this processor lacks: {INSTEAD}")


def library_name(variant: ProcessorKind | None = None) -> str:
    """Return the file name of the library of these sources and flags, for a kind of processor or the best here."""
    variant = variant or supported()[0]
    sources = [source.read_bytes() for source in SOURCES]
    parts = [*sources, " ".join((*FLAGS, *LINKED, *variant.options)).encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"cpu-{variant.name}-{digest[:16]}.so"


def record_of(path: Path) -> Path:
    """Return the file with the checksum of a library."""
    return path.with_suffix(".json")


def compile_library(compiler: str, variant: ProcessorKind, folder: Path) -> Path:
    """Compile a library and write its record; return its path. CompilerError if the compiler fails."""
    made = folder / library_name(variant)
    command = [compiler, *FLAGS, *LINKED, *variant.options, "-o", str(made), str(SOURCES[0])]
    run(command, folder)
    record = {"sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
    record_of(made).write_text(json.dumps(record), encoding="utf-8")
    return made


def run(command: list[str], folder: Path) -> None:
    """Run a compiler with its temporary files in a folder; CompilerError with its first error if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"TMPDIR": str(folder)})
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
    try:
        compiler = find_compiler()
    except ValueError as error:
        return [], [str(error)]
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(variant: ProcessorKind) -> Path | str:
        try:
            return compile_library(compiler, variant, folder)
        except CompilerError as error:
            return f"{variant.name}: {error}"

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = list(pool.map(compiled, [variant for variant in variants if library_name(variant) not in known]))
    return [one for one in found if isinstance(one, Path)], [one for one in found if isinstance(one, str)]


class UntrustedError(Exception):
    """A library that must not be loaded; the message is the reason."""


@cache
def library() -> ctypes.CDLL:
    """Return the library for this processor, built if necessary; ValueError without a compiler, or if it fails.

    A damaged library is rebuilt once.
    """
    for path in candidates():
        try:
            return _load(path)
        except UntrustedError as error:
            LOG.warning("%s: %s; building it again", path, error)
    path = _build(find_compiler())
    try:
        return _load(path)
    except UntrustedError as error:
        raise ValueError(f"{path}: {error} right after it was built: {INSTEAD}") from error


def candidates() -> list[Path]:
    """Return the libraries that exist and suit this processor, the best first."""
    names = [library_name(variant) for variant in supported()]
    places = [folder / name for name in names for folder in (PACKAGED, *folders())]
    return [path for path in places if os.path.exists(path)]  # not where they cannot be read


def missing() -> str | None:
    """Return why `library` would have to build, or None if there is a trusted one that loads. Builds nothing."""
    if library.cache_info().currsize:
        return None
    reason = "the C++ library is not built"
    for path in candidates():
        try:
            _load(path)
        except UntrustedError as error:
            reason = f"{path}: {error}"
        else:
            return None
    return reason


def has_amx() -> bool:
    """Return whether bf16 products use AMX, which Linux grants on request; ValueError as for `library`."""
    return bool(library().lantern_has_amx())


def processor() -> str:
    """Return what identifies the instruction set: kind and features of the processor."""
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    known = [f"{name}: {facts()[name]}" for name in names if name in facts()]
    return "\n".join(known) or f"{platform.machine()} {platform.processor()}"


def folders() -> list[Path]:
    """Return where libraries are looked for: the user's cache, and a private folder for when that is not writable."""
    from lantern.core.io import user_cache

    name, found = "library" if _user_id() is None else str(_user_id()), [user_cache() / "cpu"]
    with suppress(FileNotFoundError):  # no folder for temporary files, as in a container that is read-only
        found.append(Path(tempfile.gettempdir()) / f"lantern-{name}")
    return found


def check_trust(path: Path) -> None:
    """Raise UntrustedError if a library is not exactly what this user, or who installed the package, has built."""
    is_packaged = path.parent == PACKAGED
    for part in (path.parent, path, record_of(path)):
        try:
            found = os.lstat(part)
        except OSError as error:
            raise UntrustedError(f"{part.name} cannot be read ({error.strerror})") from error
        if not (stat.S_ISDIR(found.st_mode) if part == path.parent else stat.S_ISREG(found.st_mode)):
            raise UntrustedError(f"{part.name} is a link or no plain file")
        # A packaged library is as trustworthy as this file.
        owner = os.stat(__file__).st_uid if is_packaged else _user_id()
        if os.name == "posix" and (found.st_uid != owner or found.st_mode & (0o002 if is_packaged else 0o022)):
            raise UntrustedError(f"{part.name} belongs to another user or is writable by others")
    try:
        record = json.loads(record_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UntrustedError("its record is damaged") from error
    if record != {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}:
        raise UntrustedError("its checksum is wrong")


def _load(path: Path) -> ctypes.CDLL:
    check_trust(path)
    try:
        found = ctypes.CDLL(str(path))
        for name in (*FUNCTIONS, *(WITH_AMX if found.lantern_has_amx() else ())):
            call = getattr(found, f"lantern_{name}")
            call.restype, call.errcheck = ctypes.c_int64, _check_status
    except (OSError, AttributeError) as error:
        raise UntrustedError(f"it cannot be loaded ({error})") from error
    return found


def _check_status(result: Any, call: object, given: object) -> Any:
    """Return the result of a call; MemoryError if it ran out of memory."""
    if result < 0:
        raise MemoryError("the C++ engine ran out of memory")
    return result


def _build(compiler: str) -> Path:
    """Compile for this processor into the first folder that is writable, private and not noexec; return its path.

    A compiler that does not know the processor compiles for the next older kind.
    """
    folder = _writable_folder()
    work, errors = Path(tempfile.mkdtemp(dir=folder)), list[str]()
    try:
        for variant in supported():
            try:
                made = compile_library(compiler, variant, work)
            except CompilerError as error:
                errors.append(str(error))
                continue
            for part in (made, record_of(made)):
                part.chmod(0o600)
                part.replace(folder / part.name)  # another process may have built the same
            return folder / made.name
    finally:
        shutil.rmtree(work, ignore_errors=True)
    raise ValueError(f"{compiler} could not build the cpu engine ({errors[0]}): {INSTEAD}")


def _writable_folder() -> Path:
    faults = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.lstat(folder)
            is_own = _user_id() is None or (found.st_uid == _user_id() and not found.st_mode & 0o022)
            if not (stat.S_ISDIR(found.st_mode) and is_own and os.access(folder, os.W_OK)):
                faults.append(f"{folder} is not a private folder of this user")
            elif os.statvfs(folder).f_flag & os.ST_NOEXEC:
                faults.append(f"{folder} is mounted noexec, so that no library loads from it")
            else:
                return folder
        except OSError as error:
            faults.append(f"{folder}: {error.strerror or error}")
    raise ValueError(f"the cpu engine cannot be stored ({'; '.join(faults)}): set XDG_CACHE_HOME, or {INSTEAD}")


def _user_id() -> int | None:
    return os.getuid() if hasattr(os, "getuid") else None
