"""Pictures and archives that the tests of data preparation read, and committed configs at toy size."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern.training.data import ImagesConfig, Record, write_prepared
from lantern.training.stages import Recipe, find_config
from recipes.emoji.packages import archives

SMALL_VQ = {"ch": 32, "encoder_ch_mult": [1, 1, 1], "decoder_ch_mult": [1, 1, 1], "z_channels": 32, "codebook_size": 64}
SMALL_TARGET = {"dim": 64, "n_layer": 2, "n_head": 1, "vocab_size": 64, "block_size": 16}


def disc(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    """A disc of one colour on nothing, (size size 4)."""
    rows, columns = np.mgrid[:size, :size]
    inside = (rows - size / 2) ** 2 + (columns - size / 2) ** 2 < (size / 3) ** 2
    picture = np.zeros((size, size, 4), np.uint8)
    picture[inside] = (*colour, 255)
    return picture


def noisy(colour: tuple[int, int, int], seed: int) -> Image.Image:
    """A photograph of one colour, darker on the right."""
    noise, shade = np.random.default_rng(seed).integers(0, 20, (40, 48, 3)), np.linspace(60, 0, 48)[None, :, None]
    return Image.fromarray((np.array(colour) + noise + shade).clip(0, 255).astype(np.uint8))


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def archive(path: Path, files: Mapping[str, bytes | str]) -> str:
    """Writes a tar file of these files; gives its SHA-256."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, content in files.items():
            data, info = content.encode() if isinstance(content, str) else content, tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def logged(folder: Path, name: str = "") -> list[dict[str, Any]]:
    """The lines of the log of a training, or those that have a figure of this name."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if not name or name in line]


def prepared(folder: Path, made: Iterable[tuple[np.ndarray, Record]]) -> Path:
    """Write pictures and their records as prepared data."""
    write_prepared(folder, (partial(tuple, one) for one in made), ImagesConfig(), origin="x")
    return folder


def packed(folder: Path, files: dict[str, dict[str, bytes | str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write archives of the emoji recipe's names with these files, known by their new hashes; gives the folder."""
    folder.mkdir()
    for name, members in files.items():
        package = archives()[name]
        digest = archive(folder / package.file_name, {f"package/{path}": data for path, data in members.items()})
        monkeypatch.setitem(archives(), name, replace(package, sha256=digest))
    return folder


def small_configs(home: Path, steps: str, changes: dict[str, dict[str, Any]], recipe: Recipe | None = None) -> Path:
    """Write committed configs with fields of theirs changed, and the config `steps` that lists them; gives its path."""
    home.mkdir()
    for name, changed in changes.items():
        raw = json.loads(find_config(name, recipe).read_text())
        raw |= changed | ({"model": raw["model"] | changed["model"]} if "model" in changed else {})
        if "loop" in raw:
            raw["loop"] |= {"warmup": 1, "decay": 1, "evaluate_every": 100, "precision": "fp32"}
        (home / f"{name}.json").write_text(json.dumps(raw))
    listed = json.loads(find_config(steps, recipe).read_text())
    for step in listed["steps"]:
        step["config"] += ".json"
    (home / f"{steps}.json").write_text(json.dumps(listed))
    return home / f"{steps}.json"
