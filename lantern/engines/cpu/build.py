"""Build and load the C++ library of the cpu engine.

The library is compiled once for the processor at hand and cached. A cached library is loaded only if its file and its
record belong to the user, are writable by nobody else, and agree in checksum and ABI number.
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
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from lantern.core.io import user_cache

LOG = logging.getLogger("lantern")
ABI = 2  # as `lantern_abi` of steps.cpp
# the first includes the others
SOURCES = [
    Path(__file__).with_name(name) for name in ("steps.cpp", "sampling.h", "pass.cpp", "tiles.h", "thread_policy.h")
]
# No contraction: fused multiply-adds are written out, or results would depend on the size of a tile.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fopenmp")
FUNCTIONS = ("pass", "linear", "steps", "sample")  # with a status as result
INSTEAD = "use --engine eager"


class UntrustedError(Exception):
    """A cached library that must not be loaded; the message is the reason."""


@cache
def library() -> ctypes.CDLL:
    """Return the library, built if necessary; ValueError without a compiler, or if it fails.

    A damaged library is rebuilt once.
    """
    name = library_name()
    for folder in folders():
        path = folder / name
        if path.exists():
            try:
                return _load(path)
            except UntrustedError as error:
                LOG.warning("%s: %s; building it again", path, error)
    path = _build(find_compiler(), name)
    try:
        return _load(path)
    except UntrustedError as error:
        raise ValueError(f"{path}: {error} right after it was built: {INSTEAD}") from error


def missing() -> str | None:
    """Return why `library` would have to build, or None if a trusted library is cached. Loads and builds nothing."""
    reason = "the C++ library is not built"
    for folder in folders():
        path = folder / library_name()
        if path.exists():
            try:
                check_trust(path)
            except UntrustedError as error:
                reason = f"{path}: {error}"
            else:
                return None
    return reason


def has_amx() -> bool:
    """Return whether bf16 products use AMX, which Linux grants on request; ValueError as for `library`."""
    return bool(library().lantern_has_amx())


def find_compiler() -> str:
    """Return the command of $CXX, or g++; ValueError without either."""
    for name in (os.environ.get("CXX"), "g++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise ValueError(
        "the cpu engine is built by g++ 9 or later, which was not found: install it, or set CXX to its name, or "
        f"{INSTEAD}"
    )


@cache
def processor() -> str:
    """Return what identifies the instruction set: kind and features of the processor."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return f"{platform.machine()} {platform.processor()}"
    first = listing.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in names)


def library_name() -> str:
    """Return the file name of the library of these sources, flags and processor."""
    sources = [source.read_bytes() for source in SOURCES]
    parts = [*sources, " ".join(FLAGS).encode(), processor().encode(), str(ABI).encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"cpu-{digest[:24]}.so"


def folders() -> list[Path]:
    """Return where libraries are looked for: the user's cache, and a private folder for when that is not writable."""
    return [user_cache() / "cpu", Path(tempfile.gettempdir()) / f"lantern-{_user()}"]


def record_of(path: Path) -> Path:
    """Return the file with checksum and ABI number of a library."""
    return path.with_suffix(".json")


def check_trust(path: Path) -> None:
    """Raise UntrustedError if a cached library is not exactly what this user built for this version."""
    for part in (path.parent, path, record_of(path)):
        try:
            found = os.lstat(part)
        except OSError as error:
            raise UntrustedError(f"{part.name} cannot be read ({error.strerror})") from error
        if not (stat.S_ISDIR(found.st_mode) if part == path.parent else stat.S_ISREG(found.st_mode)):
            raise UntrustedError(f"{part.name} is a link or no plain file")
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            raise UntrustedError(f"{part.name} belongs to another user or is writable by others")
    try:
        record = json.loads(record_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UntrustedError("its record is damaged") from error
    if not isinstance(record, dict) or record.get("abi") != ABI:
        raise UntrustedError(f"its ABI number is not {ABI}")
    if record.get("sha256") != hashlib.sha256(path.read_bytes()).hexdigest():
        raise UntrustedError("its checksum is wrong")


def _load(path: Path) -> ctypes.CDLL:
    check_trust(path)
    try:
        found = ctypes.CDLL(str(path))
        abi = found.lantern_abi()
    except (OSError, AttributeError) as error:
        raise UntrustedError(f"it cannot be loaded ({error})") from error
    if abi != ABI:
        raise UntrustedError(f"its ABI number is {abi}, expected {ABI}")
    for name in FUNCTIONS:
        call = getattr(found, f"lantern_{name}")
        call.restype, call.errcheck = ctypes.c_int64, _check_status
    return found


def _check_status(result: Any, call: object, given: object) -> Any:
    """Return the result of a call; MemoryError if it ran out of memory."""
    if result < 0:
        raise MemoryError("the C++ engine ran out of memory")
    return result


def _build(compiler: str, name: str) -> Path:
    """Compile into the first folder that is writable and private; return the library's path."""
    folder = _writable_folder()
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        made = work / name
        _run([compiler, *FLAGS, "-o", str(made), str(SOURCES[0])])
        record = {"abi": ABI, "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
        record_of(made).write_text(json.dumps(record), encoding="utf-8")
        for part in (made, record_of(made)):
            part.chmod(0o600)
            part.replace(folder / part.name)  # another process may have built the same
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder / name


def _writable_folder() -> Path:
    faults = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.lstat(folder)
            is_own = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
            if stat.S_ISDIR(found.st_mode) and is_own and os.access(folder, os.W_OK):
                return folder
            faults.append(f"{folder} is not a private folder of this user")
        except OSError as error:
            faults.append(f"{folder}: {error.strerror or error}")
    raise ValueError(f"the cpu engine cannot be stored ({'; '.join(faults)}): set XDG_CACHE_HOME, or {INSTEAD}")


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "library"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", b"") or str(error).encode()
        first = next((line for line in output.decode(errors="replace").splitlines() if "error" in line), str(error))
        raise ValueError(f"{command[0]} could not build the cpu engine ({first.strip()}): {INSTEAD}") from error
