"""Pictures of the user's own: a folder with captions, an image folder with class names, webdataset shards.

Each is a stream of (name, picture file, captions, class); what cannot be read is named, not fatal.
"""

import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lantern.training.captions import article
from lantern.training.data import DataConfig, Record, Writer, share_of

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
CAPTION_FIELDS = ("captions", "caption", "text", "prompt")


@dataclass(frozen=True)
class Sample:
    """One picture file and its captions; no captions when it came without. `label` is its class or ""."""

    name: str
    data: bytes
    captions: tuple[str, ...]
    label: str = ""


def write_source(config: DataConfig, writer: Writer, *, progress: Callable[[int, int], None]) -> list[str]:
    """Write all usable samples of the source. Returns "name: reason" of those left out.

    Raises ValueError when the path does not hold such data.
    """
    readers = {"folder": read_folder, "classes": read_classes, "webdataset": read_shards}
    skipped = []
    for done, sample in enumerate(readers[config.source](Path(config.path)), 1):
        progress(done, 0)
        if not sample.captions:
            skipped.append(f"{sample.name}: no caption")
            continue
        picture = read_square(sample.data, config.size)
        if picture is None:
            skipped.append(f"{sample.name}: not a picture that can be read")
            continue
        share = round(1 / len(sample.captions), 4)
        record = Record(
            image=0,
            captions=tuple((caption, share) for caption in sample.captions),
            kind="plain",
            concepts=(sample.label,) if sample.label else (),
            style="",
            split="heldout" if share_of(sample.name) < config.held_out else "train",
        )
        writer.add(picture, record)
    return skipped


def read_square(data: bytes, size: int) -> UInt8[np.ndarray, "h w 3"] | None:
    """The centre square of a picture file on white at `size` pixels, or None when it cannot be decoded."""
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
    """Pictures, at any depth, with `NAME.txt` beside them: one caption a line."""
    for file in list_pictures(path):
        text = file.with_suffix(".txt")
        captions = text.read_text(encoding="utf-8", errors="replace") if text.is_file() else ""
        yield Sample(file.relative_to(path).as_posix(), file.read_bytes(), clean_lines(captions))


def read_classes(path: Path) -> Iterator[Sample]:
    """Pictures below `CLASS_NAME/`: the folder's name, with spaces for underscores, is the caption."""
    for file in list_pictures(path):
        name = file.relative_to(path)
        label = " ".join(name.parts[0].replace("_", " ").split()) if len(name.parts) > 1 else ""
        captions = (label, article(label)) if label else ()
        yield Sample(name.as_posix(), file.read_bytes(), captions, label)


def list_pictures(path: Path) -> list[Path]:
    """All picture files below the folder, sorted. Raises ValueError when it is none or holds none."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder, wanted one with pictures: check the path")
    found = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    if not found:
        raise ValueError(f"{path} holds no picture, wanted files such as {', '.join(sorted(SUFFIXES))}")
    return found


def read_shards(path: Path) -> Iterator[Sample]:
    """Samples of one tar shard or of all `*.tar` of a folder: members that share the name up to its first dot."""
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
    """The samples of one shard; a sample's members stand next to each other."""
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
    """The sample that the members make, if a picture is among them."""
    picture = next((data for suffix, data in parts.items() if suffix in SUFFIXES), None)
    if picture is not None:
        captions = clean_lines(parts.get(".txt", b"").decode("utf-8", errors="replace"))
        yield Sample(name, picture, captions or json_captions(parts.get(".json", b"{}")))


def json_captions(data: bytes) -> tuple[str, ...]:
    """Captions of a JSON member: a text or a list of texts under one of CAPTION_FIELDS; none when there are none."""
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
    """The different lines that hold something, without the space around them."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
