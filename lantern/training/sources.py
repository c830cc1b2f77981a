"""Sources of training data: a folder with captions, class folders, webdataset shards (`lantern train data`).

Each is a stream of (name, image file, captions, class). Inputs that cannot be read are listed and left out.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import UInt8

from lantern.training.config import TrainingConfig
from lantern.training.data import Filled, Made, Progress, Record, Summary, Writer, share_of, write_prepared

SOURCES = ("folder", "classes", "webdataset")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
CAPTION_FIELDS = ("captions", "caption", "text", "prompt")


@dataclass(frozen=True)
class DataConfig(TrainingConfig):
    """What to prepare.

    source: one of SOURCES. path: the folder or file to read, relative to the folder of the config. size: side of
    an image in pixels, 8 to 4096. held_out: share of images kept from training, from 0 to below 0.5. mirrors: add
    the mirror image of every training image. seed: written to the summary; nothing here is random.
    ValueError for an unknown source and for values out of range.
    """

    source: str = "folder"
    path: str = ""
    size: int = 64
    seed: int = 0
    held_out: float = 0.05
    mirrors: bool = False

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}, wanted one of {', '.join(SOURCES)}: change the config")
        check_sizes(self.size, self.held_out)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON config. Raises ValueError, in one line, if the file or a field is wrong."""
        config = super().load(path)
        return replace(config, path=str(path.resolve().parent / config.path) if config.path else "")


def check_sizes(size: int, held_out: float) -> None:
    """Raise ValueError for a side in pixels or a held-out share out of range."""
    if not 8 <= size <= 4096:
        raise ValueError(f"size is {size}, wanted 8 to 4096 pixels: change the config")
    if not 0 <= held_out < 0.5:
        raise ValueError(f"held_out is {held_out}, wanted at least 0 and less than 0.5")


@dataclass(frozen=True)
class Sample:
    """One image file and its captions, which may be none. `label` is its class or ""."""

    name: str
    data: bytes
    captions: tuple[str, ...]
    label: str = ""


def prepare(config: DataConfig, *, out: Path, path: Path | None = None, progress: Progress | None = None) -> Summary:
    """Prepare the images of a source into `out`, which is replaced as a whole once everything is written.

    `path` replaces that of the config. `progress` is called with (done, total), total 0 if it is not known. Raises
    ValueError, in one line, for a wrong path or if no image is usable.
    """
    if path is None and not config.path:
        raise ValueError(f"path is empty, wanted the {config.source} data to read: give --path")
    origin = path or Path(config.path)
    readers = {"folder": read_folder, "classes": read_classes, "webdataset": read_shards}

    def fill(writer: Writer) -> Filled:
        variants = ("original", "mirror") if config.mirrors else ("original",)
        jobs = (
            partial(make, sample, config, variant)
            for sample in readers[config.source](origin)
            for variant in variants
            if variant == "original" or not is_held_out(sample, config.held_out)
        )
        skipped: dict[str, None] = {}
        for done, reason in enumerate(writer.add_all(jobs), 1):
            if reason is not None:
                skipped[reason] = None
            if progress is not None:
                progress(done, 0)
        return Filled([*skipped])

    return write_prepared(out, fill, source=config.source, origin=str(origin), seed=config.seed, size=config.size)


def make(sample: Sample, config: DataConfig, variant: str = "original") -> Made | str:
    """Return the image and the record of a sample or its mirror, or "name: reason" if it cannot be used."""
    if not sample.captions:
        return f"{sample.name}: no caption"
    picture = read_square(sample.data, config.size)
    if picture is None:
        return f"{sample.name}: not an image that can be read"
    if variant == "mirror":
        picture = np.ascontiguousarray(picture[:, ::-1])
    share = round(1 / len(sample.captions), 4)
    return picture, Record(
        image=0,
        captions=tuple((caption, share) for caption in sample.captions),
        kind="plain",
        concepts=(sample.label,) if sample.label else (),
        style="",
        split="heldout" if is_held_out(sample, config.held_out) else "train",
        variant=variant,
    )


def is_held_out(sample: Sample, held_out: float) -> bool:
    """Return whether a sample is kept from training, which its name alone decides."""
    return share_of(sample.name) < held_out


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
        captions = (label, article(label)) if label else ()
        yield Sample(name.as_posix(), file.read_bytes(), captions, label)


def list_pictures(path: Path) -> list[Path]:
    """Return all image files below the folder, sorted; ValueError if it is no folder or holds none."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder, wanted one with images: check the path")
    found = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    if not found:
        raise ValueError(f"{path} holds no image, wanted files such as {', '.join(sorted(SUFFIXES))}")
    return found


def read_shards(path: Path) -> Iterator[Sample]:
    """Yield samples of one tar file or of all `*.tar` of a folder: members with the same name up to the first dot.

    ValueError for a path without tar files and for an incomplete file.
    """
    shards = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not shards or not all(shard.is_file() for shard in shards):
        raise ValueError(f"{path} is no tar file and no folder with *.tar files: check the path")
    for shard in shards:
        try:
            with tarfile.open(shard) as tar:
                yield from read_shard(tar, shard.name)
        except tarfile.TarError as error:
            raise ValueError(f"{shard}: not a complete tar file ({error}): fetch it again") from error


def read_shard(tar: tarfile.TarFile, shard: str) -> Iterator[Sample]:
    """Yield the samples of one shard; the members of a sample are adjacent."""
    key, parts = None, {}
    for member in (member for member in tar if member.isfile()):
        folder, _, file = member.name.rpartition("/")
        stem, _, suffix = file.partition(".")
        if (folder, stem) != key:
            yield from sample_of(f"{shard}/{key[1]}" if key else "", parts)
            key, parts = (folder, stem), {}
        content = tar.extractfile(member)
        assert content is not None
        parts[f".{suffix.lower()}"] = content.read()
    yield from sample_of(f"{shard}/{key[1]}" if key else "", parts)


def sample_of(name: str, parts: dict[str, bytes]) -> Iterator[Sample]:
    """Yield the sample of these members if an image is among them."""
    picture = next((data for suffix, data in parts.items() if suffix in SUFFIXES), None)
    if picture is not None:
        captions = clean_lines(parts.get(".txt", b"").decode("utf-8", errors="replace"))
        yield Sample(name, picture, captions or json_captions(parts.get(".json", b"{}")))


def json_captions(data: bytes) -> tuple[str, ...]:
    """Return the captions of a JSON member: a text or a list of texts under one of CAPTION_FIELDS."""
    try:
        values = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return ()
    for name in CAPTION_FIELDS:
        found = values.get(name) if isinstance(values, dict) else None
        if isinstance(found, str):
            return clean_lines(found)
        if isinstance(found, list):
            return clean_lines("\n".join(text for text in found if isinstance(text, str)))
    return ()


def clean_lines(text: str) -> tuple[str, ...]:
    """Return the distinct non-empty lines, stripped."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def article(name: str) -> str:
    """Return the name with "a" or "an" by its sound."""
    if re.match(r"(uni|one-|ufo|eu)", name):
        return f"a {name}"
    return f"an {name}" if name[0] in "aeiou" or name.startswith("hour") else f"a {name}"
