"""Sources of training data: a folder with captions, class folders, webdataset shards (`lantern train data`).

Each is a stream of (name, image file, captions, class). Inputs that cannot be read are listed and left out.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from lantern.training.data import Made, Record, Summary, check_sizes, share_of, write_prepared

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
CAPTION_FIELDS = ("captions", "caption", "text", "prompt")


@dataclass(frozen=True)
class DataConfig:
    """What to prepare.

    path: the folder or file to read, relative to the folder of the config. size: side of an image in pixels, 8 to 4096.
    held_out: share of images kept from training, from 0 to below 0.5. mirrors: add the mirror image of every training
    image. seed: written to the summary; nothing here is random. ValueError for values out of range.
    """

    source: Literal["folder", "classes", "webdataset"] = "folder"
    path: Path | None = None
    size: int = 64
    seed: int = 0
    held_out: float = 0.05
    mirrors: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.size, self.held_out)


@dataclass(frozen=True)
class Sample:
    """One image file and its captions, which may be none. `label` is its class or ""."""

    name: str
    data: bytes
    captions: tuple[str, ...]
    label: str = ""


def prepare(config: DataConfig, *, out: Path, path: Path | None = None) -> Summary:
    """Prepare the images of a source into `out`, which is replaced as a whole once everything is written.

    `path` replaces that of the config. ValueError, in one line, for a wrong path or if no image is usable.
    """
    origin = path or config.path
    if origin is None:
        raise ValueError(f"path is empty, wanted the {config.source} data to read: give --path")
    readers = {"folder": read_folder, "classes": read_classes, "webdataset": read_shards}
    variants = ("original", "mirror") if config.mirrors else ("original",)
    jobs = (
        partial(make, sample, config, variant)
        for sample in readers[config.source](origin)
        for variant in variants
        if variant == "original" or share_of(sample.name) >= config.held_out
    )
    return write_prepared(out, jobs, source=config.source, origin=str(origin), seed=config.seed, size=config.size)


def make(sample: Sample, config: DataConfig, variant: str) -> Made | str:
    """Return the image and the record of a sample or its mirror, or "name: reason" if it cannot be used.

    The name of a sample alone decides whether it is kept from training.
    """
    if not sample.captions:
        return f"{sample.name}: no caption"
    picture = read_square(sample.data, config.size)
    if picture is None:
        return f"{sample.name}: not an image that can be read"
    share = round(1 / len(sample.captions), 4)
    return np.ascontiguousarray(picture[:, ::-1]) if variant == "mirror" else picture, Record(
        image=0,
        captions=tuple((caption, share) for caption in sample.captions),
        kind="plain",
        concepts=(sample.label,) if sample.label else (),
        style="",
        split="heldout" if share_of(sample.name) < config.held_out else "train",
        variant=variant,
    )


def read_square(data: bytes, size: int) -> UInt8[np.ndarray, "h w 3"] | None:
    """Return the centre square of an image file on white at `size` pixels, None if it cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(data)) as file:
            image = ImageOps.exif_transpose(file).convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    ground.alpha_composite(image)
    return np.asarray(ground.convert("RGB"))


def read_folder(path: Path) -> Iterator[Sample]:
    """Yield images at any depth; `NAME.txt` beside an image holds its captions, one per line."""
    for file in list_pictures(path):
        text = file.with_suffix(".txt")
        captions = text.read_text(encoding="utf-8", errors="replace") if text.is_file() else ""
        yield Sample(file.relative_to(path).as_posix(), file.read_bytes(), clean_lines(captions))


def read_classes(path: Path) -> Iterator[Sample]:
    """Yield images below `CLASS_NAME/`; the caption is the folder's name with spaces for underscores."""
    for file in list_pictures(path):
        name = file.relative_to(path)
        label = " ".join(name.parts[0].replace("_", " ").split()) if len(name.parts) > 1 else ""
        yield Sample(name.as_posix(), file.read_bytes(), (label, article(label)) if label else (), label)


def list_pictures(path: Path) -> list[Path]:
    """Return all image files below the folder, sorted; ValueError if it is no folder or holds none."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder, wanted one with images: check the path")
    found = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    if not found:
        raise ValueError(f"{path} holds no image, wanted files such as {', '.join(sorted(SUFFIXES))}")
    return found


def read_shards(path: Path) -> Iterator[Sample]:
    """Yield samples of one tar file or of all `*.tar` of a folder: adjacent members with one name up to the first dot.

    ValueError for a path without tar files and for an incomplete file.
    """
    shards = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not shards or not all(shard.is_file() for shard in shards):
        raise ValueError(f"{path} is no tar file and no folder with *.tar files: check the path")

    def key(member: tarfile.TarInfo) -> tuple[str, str]:
        name = PurePosixPath(member.name)
        return str(name.parent), name.name.partition(".")[0]

    for shard in shards:
        try:
            with tarfile.open(shard) as tar:
                for (_, stem), members in groupby((member for member in tar if member.isfile()), key):
                    files = [
                        (PurePosixPath(m.name).name.partition(".")[2].lower(), tar.extractfile(m)) for m in members
                    ]
                    parts = {f".{suffix}": file.read() for suffix, file in files if file is not None}
                    picture = next((data for suffix, data in parts.items() if suffix in SUFFIXES), None)
                    if picture is not None:
                        captions = clean_lines(parts.get(".txt", b"").decode("utf-8", errors="replace"))
                        captions = captions or json_captions(parts.get(".json", b"{}"))
                        yield Sample(f"{shard.name}/{stem}", picture, captions)
        except tarfile.TarError as error:
            raise ValueError(f"{shard}: not a complete tar file ({error}): fetch it again") from error


def json_captions(data: bytes) -> tuple[str, ...]:
    """Return the captions of a JSON member: a text or a list of texts under the first of CAPTION_FIELDS."""
    try:
        values: Any = json.loads(data)
    except ValueError:
        return ()
    fields = (values.get(name) for name in CAPTION_FIELDS) if isinstance(values, dict) else ()
    found = next((field for field in fields if isinstance(field, str | list)), "")
    texts = [found] if isinstance(found, str) else [text for text in found if isinstance(text, str)]
    return clean_lines("\n".join(texts))


def clean_lines(text: str) -> tuple[str, ...]:
    """Return the distinct non-empty lines, stripped."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def article(name: str) -> str:
    """Return the name with "a" or "an" by its sound."""
    if re.match(r"(uni|one-|ufo|eu)", name):
        return f"a {name}"
    return f"an {name}" if name[0] in "aeiou" or name.startswith("hour") else f"a {name}"
