"""The setting of a measurement: machine, versions, commit, threads, load."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import lantern
from lantern.core.config import installed
from lantern.engines.cpu.build import facts
from lantern.models.folder import Model

HERE = Path(lantern.__file__).resolve().parents[1]
# Files whose changes do not change what a command measures: results and documents, which commands write one by one
NO_CODE = (":!eval/results", ":!docs", ":!*.md", ":!*.png")


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return what is needed to repeat a measurement; no names of persons or hosts."""
    return {
        "lantern": lantern.__version__,
        "commit": commit(HERE),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": installed("torchao"),
        "cpu": facts().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
    }


def about(model: Model) -> dict[str, Any]:
    """Return which model a measurement is of and its setting: name, fingerprint of the files, surroundings."""
    return {"model": model.name, "fingerprint": model.fingerprint, "surroundings": surroundings(model.device)}


def commit(folder: Path) -> str:
    """Return the commit of a checkout, with "+changes" if its code differs; outside a checkout the package version."""
    if not (folder / "pyproject.toml").is_file():
        return lantern.__version__
    status = ("status", "--porcelain", "--untracked-files=no", "--", ".", *NO_CODE)
    how: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 30}
    try:
        parts = (("rev-parse", "HEAD"), status)
        head, changes = (subprocess.check_output(["git", "-C", str(folder), *words], **how).strip() for words in parts)
    except (OSError, subprocess.SubprocessError):  # without git, or in no repository
        return lantern.__version__
    return head + "+changes" * bool(changes)


def load_average() -> list[float]:
    """Return the load average over 1, 5 and 15 minutes; nothing on Windows."""
    return [] if platform.system() == "Windows" else [round(value, 2) for value in os.getloadavg()]


def file_hashes(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of the files of a folder, such as a trained part."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def short_commit(commit: str) -> str:
    """Return the first 12 digits of what `commit` returned, and "+changes" if it ends so."""
    digits, mark, changes = commit.partition("+")
    return digits[:12] + mark + changes
