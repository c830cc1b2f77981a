"""Prepared data: images of one size, captions with weights, and where they came from, in one small folder.

A folder holds `pictures.tar` (PNG files, numbered), `records.jsonl` (one record per line) and `summary.json`.
`write_prepared` writes it, `Prepared.open` reads it. `sources.py` and recipes provide the images. A packed folder
(`pack.py`) has codes instead of images, and compressed records.
"""

import gzip
import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.io import atomic_write, sha256_of, write_json

CACHE = "pictures.npy"  # all pictures decoded, written when they are first read
RECORDS, PACKED_RECORDS = "records.jsonl", "records.jsonl.gz"
FILES = {"pictures.tar", RECORDS, "summary.json", CACHE}
KINDS = ("plain", "colour", "count", "pair")
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Record:
    """One image with its captions.

    image: its number. captions: (text, weight) pairs, weights summing to one. kind: one of KINDS. concepts: names, one
    for plain, colour and count, two for a pair (left, right), none if unknown. style: name of the style or "".
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
    without the summary.
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

    def __str__(self) -> str:
        return f"{self.records} images, {self.bytes / 2**20:.1f} MiB, {self.num_skipped} inputs left out"


Made = tuple[np.ndarray, Record]  # a picture (h w 3, bytes) with its record


@dataclass
class Writer:
    """Writes images and records one by one; `close` completes the folder."""

    folder: Path
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        path = self.folder / "pictures.tar"
        self.tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 (closed by close)

    def add_all(self, jobs: Iterable[Callable[[], Made | str]], *, workers: int | None = None) -> Iterator[str | None]:
        """Append the image of each job in order; yield None, or the text that a job returns instead of an image.

        A record's `image` is set to its number. Jobs run in threads on all cores, or in `workers`: Pillow and NumPy
        release Python's lock in most of the work. The number of workers does not change what is written.
        """

        def run(job: Callable[[], Made | str]) -> tuple[bytes, Record] | str:
            made = job()
            return made if isinstance(made, str) else (encode_png(made[0]), made[1])

        for done in map_ahead(run, jobs, workers=workers or os.cpu_count() or 1):
            if isinstance(done, str):
                yield done
            else:
                png, record = done
                info = tarfile.TarInfo(f"{len(self.records):06d}.png")
                info.size = len(png)
                self.tar.addfile(info, BytesIO(png))
                self.records.append(replace(record, image=len(self.records)))
                yield None

    def close(self) -> None:
        """Finish the archive and write the records."""
        self.tar.close()
        with (self.folder / RECORDS).open("w", encoding="utf-8") as file:
            for record in self.records:
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data. Images are decoded on access."""

    folder: Path
    records: list[Record]
    summary: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> "Prepared":
        """Read a prepared folder. Raises ValueError when it is not one."""
        folder = Path(folder)
        try:
            lines = read_records(folder).decode("utf-8").splitlines()
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            records = [record_of(json.loads(line)) for line in lines]
        except (OSError, EOFError, ValueError, TypeError, KeyError, zlib.error) as error:
            raise ValueError(f"{folder} holds no prepared data ({error}): make it with `lantern train data`") from error
        return cls(folder, records, summary)

    @property
    def digest(self) -> str:
        """The sha256 of pictures.tar, from the summary if it has one."""
        return str(self.summary.get("sha256") or sha256_of(self.folder / "pictures.tar"))

    def images(self) -> UInt8[Tensor, "n 3 h w"]:
        """Return all images in order of their numbers, mapped from a cache of decoded images.

        ValueError for a damaged cache and for another number of images than of records.
        """
        path = self.folder / CACHE
        pictures = None if path.exists() else self._decode()
        try:
            if pictures is not None:
                with atomic_write(path) as temporary, temporary.open("wb") as file:
                    np.save(file, pictures.numpy())
            # copy on write: the pictures stay on disk, and no caller changes the file
            found = torch.from_numpy(np.load(path, mmap_mode="c"))
        except PermissionError:
            found = self._decode() if pictures is None else pictures
        except (EOFError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)}): remove it") from error
        if len(found) != len(self.records):
            raise ValueError(f"{self.folder}: {len(found)} images but {len(self.records)} records: prepare it again")
        return found

    def _decode(self) -> UInt8[Tensor, "n 3 h w"]:
        """Decode all images on all cores; Pillow releases Python's lock meanwhile."""
        if not (self.folder / "pictures.tar").is_file():
            raise ValueError(f"{self.folder} has no pictures.tar: packed data serves only what it was packed for")
        with tarfile.open(self.folder / "pictures.tar") as tar:
            files = [file.read() for member in tar if (file := tar.extractfile(member)) is not None]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return torch.stack(list(threads.map(decode_png, files)))


def read_records(folder: Path) -> bytes:
    """Return the lines of the records of a prepared folder, packed or not."""
    if (folder / PACKED_RECORDS).is_file() and not (folder / RECORDS).is_file():
        return gzip.decompress((folder / PACKED_RECORDS).read_bytes())
    return (folder / RECORDS).read_bytes()


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Iterator[Result]:
    """Yield the results of items in order, computed in threads a few items ahead."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as threads:
        for item in items:
            waiting.append(threads.submit(function, item))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def encode_png(picture: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Return an image as a PNG file."""
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=9)
    return buffer.getvalue()


def record_of(values: dict[str, Any]) -> Record:
    """Return a record from its JSON form."""
    captions = tuple((text, weight) for text, weight in values.pop("captions"))
    return Record(captions=captions, concepts=tuple(values.pop("concepts")), **values)


def decode_png(data: bytes) -> UInt8[Tensor, "3 h w"]:
    """Return a PNG file's pixels, channels first."""
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def share_of(key: str) -> float:
    """Return a number in [0, 1) that depends on the key alone, the same on every machine and in every order."""
    return int(hashlib.md5(key.encode()).hexdigest()[:13], 16) / 16**13


@dataclass(frozen=True)
class Filled:
    """What a source reports after writing: inputs it left out ("name: reason") and the packages it used."""

    skipped: list[str]
    packages: list[dict[str, str]] = field(default_factory=list)


def write_prepared(
    out: Path, fill: Callable[[Writer], Filled], *, source: str, origin: str, seed: int, size: int
) -> Summary:
    """Prepare data into `out`, which is replaced as a whole once everything is written.

    `fill` adds images and records to the writer. `origin` names the input in the error that no image is usable.
    Raises ValueError, in one line, if `out` holds something else or no image is usable.
    """
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= FILES):
        raise ValueError(f"{out} exists and is no prepared data: choose another folder or remove it")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    writer = Writer(partial)
    try:
        filled = fill(writer)
        writer.close()
        if not writer.records:
            raise ValueError(
                f"{origin}: no usable image with a caption among {len(filled.skipped)}, first of them: "
                f"{', '.join(filled.skipped[:3]) or 'none'}"
            )
        summary = summarise(writer, filled, source=source, seed=seed, size=size)
        write_json(partial / "summary.json", asdict(summary))
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        writer.tar.close()
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def summarise(writer: Writer, filled: Filled, *, source: str, seed: int, size: int) -> Summary:
    """Return the summary of a finished writer."""
    records, fields = writer.records, ("kind", "split", "style")
    return Summary(
        source=source,
        seed=seed,
        size=size,
        records=len(records),
        concepts=len({name for record in records for name in record.concepts}),
        counts={name: dict(sorted(Counter(getattr(r, name) for r in records).items())) for name in fields},
        num_skipped=len(filled.skipped),
        skipped=tuple(filled.skipped[:100]),
        packages=tuple(filled.packages),
        sha256=sha256_of(writer.folder / "pictures.tar"),
        bytes=sum(path.stat().st_size for path in writer.folder.iterdir()),
    )
