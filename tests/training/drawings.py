"""Pictures and archives that the tests of data preparation read."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def disc(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    """A disc of one colour on nothing, (size size 4)."""
    rows, columns = np.mgrid[:size, :size]
    inside = (rows - size / 2) ** 2 + (columns - size / 2) ** 2 < (size / 3) ** 2
    picture = np.zeros((size, size, 4), np.uint8)
    picture[inside] = (*colour, 255)
    return picture


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def archive(path: Path, files: dict[str, bytes]) -> str:
    """Writes a tar file of these files; gives its SHA-256."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()
