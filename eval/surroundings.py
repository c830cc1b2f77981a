"""Where a measurement was taken: machine, versions, commit, threads, load."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lantern

HERE = Path(lantern.__file__).resolve().parents[1]


def surroundings(device: torch.device) -> dict[str, Any]:
    """What a reader must know to take the figures again; nothing that names a person or a host."""
    return {
        "lantern": lantern.__version__,
        "commit": commit(HERE),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": installed("torchao"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def commit(folder: Path) -> str:
    """The commit of a checkout, with "+changes" where files differ from it; elsewhere the version of the package."""
    if not (folder / "pyproject.toml").is_file():
        return lantern.__version__
    found = git(folder, "rev-parse", "HEAD")
    if found is None:
        return lantern.__version__
    return found + ("+changes" if git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def git(folder: Path, *words: str) -> str | None:
    """What git answers, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def load_average() -> list[float] | None:
    """Processes that wanted to run over the last 1, 5 and 15 minutes, where the system tells."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def cpu_name() -> str:
    """The processor, as the system calls it."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
