"""Training data: images of one size, captions with weights, and where they came from, in one small folder.

A folder holds `pictures.tar` (PNG files, numbered), `records.jsonl` (one record per line) and `summary.json`.
`write_prepared` writes it, `Prepared.open` reads it. `prepare` (`lantern train data`) takes the images from a folder
with captions, class folders or webdataset shards: streams of `Sample`, of which those that cannot be read are listed
and left out. Recipes have sources of their own.
"""

import errno
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from lantern.core.config import build_config, one_line, read_json_object
from lantern.core.io import atomic_write, sha256_of, write_json
from lantern.core.process import Stopping
from lantern.generation.images import read_image

NO_IMAGES = "has no images to train on: prepare more of them, or hold out fewer"
CACHE = "pictures.npy"  # all pictures decoded, written when they are first read
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
PICTURES, RECORDS, SUMMARY = "pictures.tar", "records.jsonl", "summary.json"
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
CAPTION_FIELDS = ("captions", "caption", "text", "prompt")


@dataclass(frozen=True)
class Record:
    """One image with its captions.

    image: its number. captions: (text, weight) pairs, weights summing to one. kind: "plain" or a recipe's composite.
    concepts: names, one for plain, two for a pair (left, right), none if unknown. style: name of the style or "".
    split: train or heldout. variant: original, mirror or shift. may_mirror: the mirror image is valid too. colour: the
    colour that it was given, or "". number: how many things it shows.
    """

    image: int
    captions: tuple[tuple[str, float], ...]
    kind: str
    concepts: tuple[str, ...]
    style: str
    split: str
    variant: str = "original"
    may_mirror: bool = True
    colour: str = ""
    number: int = 1


@dataclass(frozen=True)
class Summary:
    """Contents and origin of prepared data, written as `summary.json`.

    counts: records by kind, split and style. skipped: unreadable or uncaptioned inputs, the first hundred by name.
    packages: name, version, sha256 and licence of each archive. sha256: of pictures.tar; bytes: of the whole folder
    without the summary. origin: the input's path, or the recipe.
    """

    source: str
    seed: int
    size: int
    records: int
    concepts: int
    counts: dict[str, dict[str, int]]
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()
    packages: tuple[dict[str, str], ...] = ()
    sha256: str = ""
    bytes: int = 0
    origin: str = ""

    def __str__(self) -> str:
        first = f", listed in {SUMMARY}, first {self.skipped[0]}" if self.skipped else ""
        return f"{self.records} images, {self.bytes / 2**20:.1f} MiB, {self.num_skipped} inputs left out{first}"


Made = tuple[UInt8[np.ndarray, "h w 3"], Record]  # an image with its record, whose number is set when it is written
Job = Callable[[], Made | str]  # makes one image, or returns "name: reason" for an input that is left out


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data. Images are decoded on access."""

    folder: Path
    records: list[Record]
    digest: str  # the sha256 of pictures.tar

    @classmethod
    def open(cls, folder: Path | str) -> "Prepared":
        """Read a prepared folder. Raises ValueError when it is not one."""
        folder = Path(folder)
        try:
            digest = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["sha256"]
            lines = (folder / RECORDS).read_text(encoding="utf-8").splitlines()
            records = [build_config(Record, json.loads(line), source=RECORDS) for line in lines]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{folder} holds no prepared data ({error}): make it with `lantern train data`") from error
        return cls(folder, records, digest)

    @property
    def source(self) -> str:
        """The digests of images and records, which name what a training learns from."""
        return f"{self.digest} {sha256_of(self.folder / RECORDS)}"

    def images(self) -> UInt8[Tensor, "n 3 h w"]:
        """Return all images in order of their numbers, mapped from a cache of decoded images.

        ValueError for a damaged cache and for another number of images than of records.
        """
        path = self.folder / CACHE
        if not path.exists() and not (self.folder / PICTURES).is_file():
            raise ValueError(f"{self.folder} has no {PICTURES}, and no tokens of its images by this tokenizer")
        found = None if path.exists() else self._decode()
        try:
            if found is not None:
                with atomic_write(path) as temporary, temporary.open("wb") as file:
                    np.save(file, found.numpy())
            # copy on write: the pictures stay on disk, and no caller changes the file
            kept = np.load(path, mmap_mode="c")
            if kept.dtype != np.uint8 or kept.ndim != 4:
                raise ValueError(f"it has {kept.ndim} axes of {kept.dtype}, wanted 4 of uint8")
            found = torch.from_numpy(kept)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            found = self._decode() if found is None else found
        except (EOFError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)}): remove it") from error
        if len(found) != len(self.records):
            raise ValueError(f"{self.folder}: {len(found)} images but {len(self.records)} records: prepare it again")
        return found

    def _decode(self) -> UInt8[Tensor, "n 3 h w"]:
        """Decode all images on all cores; Pillow releases Python's lock meanwhile."""
        from PIL import Image

        def pixels(data: bytes) -> UInt8[Tensor, "3 h w"]:
            try:
                with Image.open(BytesIO(data), formats=("PNG",)) as image:
                    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
            except Exception as error:  # Pillow raises of every kind for damaged files
                raise tarfile.ReadError("a member is no image") from error

        with _opened(self.folder / PICTURES) as tar, ThreadPoolExecutor(os.cpu_count()) as threads:
            files = [file.read() for member in tar if (file := tar.extractfile(member)) is not None]
            found = list(threads.map(pixels, files))
            if len({one.shape for one in found}) != 1:
                raise tarfile.ReadError("wanted images of one size")
            return torch.stack(found)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Open the pictures of a prepared folder; ValueError for a damaged file."""
    try:
        with tarfile.open(path) as tar:
            yield tar
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): prepare it again") from error


def is_prepared(folder: Path) -> bool:
    """Return whether a folder was written by `lantern train data`."""
    return (folder / RECORDS).is_file() and (folder / PICTURES).is_file()


def unpack(folder: Path, out: Path) -> list[Path]:
    """Write the plain training images of a prepared folder, without mirror images, to `out`; return them in order.

    ValueError for an incomplete folder.
    """
    records = [one for one in Prepared.open(folder).records if one.kind == "plain" and one.variant != "mirror"]
    names = sorted({f"{one.image:06d}.png" for one in records if one.split == "train"})
    if not names:
        raise ValueError(f"{folder} has no plain training images: prepare it again with `lantern train data`")
    with _opened(folder / PICTURES) as tar:
        found = {member.name: member for member in tar}
        if lacking := set(names) - found.keys():
            raise ValueError(f"{folder / PICTURES} lacks {min(lacking)}: prepare it again with `lantern train data`")
        tar.extractall(out, [found[name] for name in names], filter="data")
    return [out / name for name in names]


def held_or_trained(held: list[int], trained: list[int]) -> Tensor:
    """Return the held-out images, or with a warning the first 64 that are trained on if there are none."""
    if not held:
        print("warning: no image is held out: figures called held-out are of training images", file=sys.stderr)
    return torch.tensor(held or trained[:64])


def share_of(key: str) -> float:
    """Return a number in [0, 1) that depends on the key alone, the same on every machine and in every order."""
    return int(hashlib.md5(key.encode()).hexdigest()[:13], 16) / 16**13


@dataclass(frozen=True)
class ImagesConfig:
    """What to prepare of any source.

    size: side of an image in pixels, 8 to 4096. seed: of everything random. held_out: share kept from training, from 0
    to below 0.5. mirrors: add the mirror image of every training image. ValueError for values out of range.
    """

    source: str = ""
    size: int = 64
    seed: int = 0
    held_out: float = 0.05
    mirrors: bool = False

    def __post_init__(self) -> None:
        if not 8 <= self.size <= 4096:
            raise ValueError(f"size is {self.size}, wanted 8 to 4096 pixels: change the config")
        if not 0 <= self.held_out < 0.5:
            raise ValueError(f"held_out is {self.held_out}, wanted at least 0 and less than 0.5")


def write_prepared(
    out: Path,
    jobs: Iterable[Job],
    config: ImagesConfig,
    *,
    origin: str,
    total: int | None = None,
    skipped: Iterable[str] = (),
    packages: Iterable[dict[str, str]] = (),
) -> Summary:
    """Prepare the images of jobs into `out`, which is replaced as a whole once everything is written.

    Jobs run in threads on all cores: Pillow and NumPy release Python's lock in most of the work. What is written does
    not depend on their number. `skipped` are inputs left out before, `origin` names the input. A terminal shows a bar
    up to `total`. ValueError, in one line, if `out` holds something else, or data of another input, or no image is
    usable.
    """
    from PIL import Image
    from tqdm import tqdm

    out, own = out.resolve(), {PICTURES, RECORDS, SUMMARY, CACHE}  # a link to another disk stays a link
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= own):
        raise ValueError(f"{out} exists and is no prepared data: choose another folder or remove it")
    if (out / SUMMARY).is_file() and (known := read_json_object(out / SUMMARY).get("origin", origin)) != origin:
        raise ValueError(f"{out} holds the images of {known}, got {origin}: choose another folder or remove it")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    left_out, records = dict.fromkeys(skipped), list[Record]()

    def encoded(job: Job) -> tuple[bytes, Record] | str:
        if isinstance(made := job(), str):
            return made
        Image.fromarray(made[0]).save(png := BytesIO(), "PNG", compress_level=9)
        return png.getvalue(), made[1]

    def every() -> Iterator[tuple[bytes, Record] | str]:
        count, waiting = os.cpu_count() or 1, iter(jobs)
        with ThreadPoolExecutor(count) as threads:
            while some := [*islice(waiting, 8 * count)]:  # not all at once: a job may hold its file
                yield from threads.map(encoded, some)

    try:
        with tarfile.open(partial / PICTURES, "w", format=tarfile.USTAR_FORMAT) as tar:
            for made in tqdm(every(), desc="images", total=total, disable=None):
                if isinstance(made, str):
                    left_out[made] = None
                    continue
                info = tarfile.TarInfo(f"{len(records):06d}.png")
                info.size = len(made[0])
                tar.addfile(info, BytesIO(made[0]))
                records.append(replace(made[1], image=len(records)))
        if not records:
            first = ", ".join([*left_out][:3]) or "none"
            raise ValueError(f"{origin}: no usable image with a caption among {len(left_out)}, first of them: {first}")
        lines = (json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        (partial / RECORDS).write_text("".join(lines), encoding="utf-8")
        summary = Summary(
            source=config.source,
            seed=config.seed,
            size=config.size,
            records=len(records),
            concepts=len({name for record in records for name in record.concepts}),
            counts={
                name: dict(sorted(Counter(getattr(record, name) for record in records).items()))
                for name in ("kind", "split", "style")
            },
            num_skipped=len(left_out),
            skipped=tuple([*left_out][:100]),
            packages=tuple(packages),
            sha256=sha256_of(partial / PICTURES),
            bytes=sum(path.stat().st_size for path in partial.iterdir()),
            origin=origin,
        )
        write_json(partial / SUMMARY, asdict(summary))
        with Stopping() as stopping, stopping.shield():  # between these lines neither old nor new data would stay
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


@dataclass(frozen=True)
class DataConfig(ImagesConfig):
    """What to prepare of `path`, the folder or file to read, relative to the folder of the config.

    seed: written to the summary; nothing here is random.
    """

    source: Literal["folder", "classes", "webdataset"] = "folder"
    path: Path | None = None


@dataclass(frozen=True)
class Sample:
    """One image file and its captions, which may be none, with the reason `lack`. `label` is its class or ""."""

    name: str
    data: bytes
    captions: tuple[str, ...]
    label: str = ""
    lack: str = "no caption in UTF-8"


def prepare(config: DataConfig, *, out: Path, path: Path | None = None) -> Summary:
    """Prepare the images of a source into `out`, which is replaced as a whole once everything is written.

    `path` replaces that of the config. ValueError, in one line, for a wrong path or if no image is usable.
    """
    origin = path or config.path
    if origin is None:
        raise ValueError(f"path is empty, wanted the {config.source} data to read: give --path")
    reader = {"folder": read_folder, "classes": read_classes, "webdataset": read_shards}[config.source]

    def jobs() -> Iterator[Job]:
        for sample in reader(origin):  # its name alone decides whether it is kept from training
            split = "heldout" if share_of(sample.name) < config.held_out else "train"
            yield partial(make, sample, config.size, split)
            if config.mirrors and split == "train":
                yield partial(make, sample, config.size, split, "mirror")

    return write_prepared(out, jobs(), config, origin=str(origin.resolve()))


def make(sample: Sample, size: int, split: str, variant: str = "original") -> Made | str:
    """Return the centre square of a sample's image on white, or its mirror image, at `size` pixels, and its record.

    "name: reason" if it cannot be used.
    """
    from PIL import Image, ImageOps

    if not sample.captions:
        return f"{sample.name}: {sample.lack}"
    try:
        image = read_image(sample.data).convert("RGBA")
    except Exception:  # Pillow raises of every kind for damaged files
        return f"{sample.name}: not an image that can be read"
    image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    ground.alpha_composite(image)
    picture = np.asarray((ImageOps.mirror(ground) if variant == "mirror" else ground).convert("RGB"))
    captions = tuple((caption, round(1 / len(sample.captions), 4)) for caption in sample.captions)
    concepts = (sample.label,) if sample.label else ()
    return picture, Record(0, captions, "plain", concepts, style="", split=split, variant=variant)


def read_folder(path: Path) -> Iterator[Sample]:
    """Yield images at any depth; `NAME.txt` beside an image holds its captions, one per line."""
    for file in list_pictures(path):
        text = file.with_suffix(".txt")
        data = text.read_bytes() if text.is_file() else None
        lack = "no text file" if data is None else "its text is not UTF-8" if data.strip() else "its text file is empty"
        captions = clean_lines(data or b"")
        yield Sample(file.relative_to(path).as_posix(), file.read_bytes(), captions, lack=lack)


def read_classes(path: Path) -> Iterator[Sample]:
    """Yield images below `CLASS_NAME/`; the caption is the folder's name with spaces for underscores."""
    for file in list_pictures(path):
        name = file.relative_to(path)
        label = " ".join(name.parts[0].replace("_", " ").split()) if len(name.parts) > 1 else ""
        captions = (label, article(label)) if label else ()
        yield Sample(name.as_posix(), file.read_bytes(), captions, label, lack="in no folder of a class")


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
                    files = {PurePosixPath(m.name).name.partition(".")[2].lower(): tar.extractfile(m) for m in members}
                    parts = {f".{suffix}": file.read() for suffix, file in files.items() if file is not None}
                    picture = next((data for suffix, data in parts.items() if suffix in SUFFIXES), None)
                    if picture is not None:
                        captions = clean_lines(parts.get(".txt", b"")) or json_captions(parts.get(".json", b"{}"))
                        yield Sample(f"{shard.name}/{stem}", picture, captions)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:  # of a compressed file as well
            raise ValueError(f"{shard}: not a complete tar file ({one_line(error)}): fetch it again") from error


def json_captions(data: bytes) -> tuple[str, ...]:
    """Return the captions of a JSON member: a text or a list of texts under the first of CAPTION_FIELDS."""
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ()
    fields = (values.get(name) for name in CAPTION_FIELDS) if isinstance(values, dict) else ()
    found = next((field for field in fields if isinstance(field, str | list)), "")
    texts = [found] if isinstance(found, str) else [text for text in found if isinstance(text, str)]
    return clean_lines("\n".join(texts).encode(errors="replace"))


def clean_lines(data: bytes) -> tuple[str, ...]:
    """Return the distinct non-empty lines of UTF-8 text, stripped, without its byte order mark; none of other bytes."""
    try:
        lines = map(str.strip, data.decode("utf-8-sig").splitlines())
    except UnicodeDecodeError:
        return ()
    return tuple(dict.fromkeys(line for line in lines if line))


def article(name: str) -> str:
    """Return the name with "a" or "an" by its sound."""
    has_vowel = re.match(r"hour|(?!uni|one-|ufo|eu)[aeiou]", name)
    return f"an {name}" if has_vowel else f"a {name}"
