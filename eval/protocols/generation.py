"""Generation of images for evaluation: sharded, resumable and idempotent.

    OUT/pictures/012/012345.png     image 12345 of the set, in a folder of a thousand
    OUT/manifest-1-of-4.jsonl       finished images of shard 1 of 4, one a line after its fingerprint: an `Entry`

A folder has one manifest per writer, so no two processes write to one file. A line is written after its image, which
is renamed from a temporary file, ".*.png"; those that kills left are removed when the row is complete.

Images are made in batches of consecutive numbers, and a shard is every n-th batch. A batch therefore contains the
same images in every sharding; on resume it is decoded again as a whole. A kill loses at most the current batch of
each worker (one image with the default batch of 1). Noise depends on (seed, number) only and files contain no time,
so any sharding and any number of kills give the same bytes. On another machine, or when batches are halved because
memory runs out, tokens may differ by rounding.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import lantern
from lantern.core.io import sha256_of
from lantern.core.types import Callback
from lantern.eval.json_lines import JsonLines, read_lines
from lantern.generation.generator import Generator, make_batches
from lantern.generation.images import Picture, Statistics, save_image, to_image
from lantern.generation.requests import Request

THOUSAND = 1000
Shield = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of the work, `number` from 1. ValueError for a number out of range."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"shard is {self.number}/{self.count}, wanted i/n with i from 1 to n")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parse "i/n"; ValueError for anything else."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found:
            raise ValueError(f"shard is {text[:40]!r}, wanted i/n such as 2/4")
        return cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class Entry:
    """A finished image: number in the set, size and sha256 of its file, sha256 of its tokens, its `Statistics`."""

    id: int
    bytes: int
    sha256: str
    tokens_sha256: str
    statistics: Mapping[str, Any]

    def figures(self) -> Statistics:
        """Return the statistics of the image."""
        lists = {name: tuple(self.statistics[name]) for name in ("accepted", "reached")}
        return Statistics(**{**self.statistics, **lists})


def read_entries(folder: Path, fingerprint: Mapping[str, Any] | None = None) -> dict[int, Entry]:
    """Return the entries of a folder's manifests by number; ValueError for a damaged line or another fingerprint."""
    entries: dict[int, Entry] = {}
    for path in sorted(folder.glob("manifest-*.jsonl")):
        for number, line in enumerate(read_lines(path, fingerprint)[1], start=2):
            try:
                entry = Entry(**line)
            except TypeError as error:
                raise ValueError(f"{path}, line {number} is not an entry of an image: delete that line") from error
            entries[entry.id] = entry
    return entries


def picture_path(folder: Path, number: int) -> Path:
    """Return the path of an image of a set."""
    return folder / "pictures" / f"{number // THOUSAND:03d}" / f"{number:06d}.png"


def finished(
    folder: Path, fingerprint: Mapping[str, Any] | None = None, among: Collection[int] | None = None
) -> dict[int, Entry]:
    """Return the images of a folder whose files have the recorded sha256, by number; `among` limits the numbers."""

    def is_whole(entry: Entry) -> bool:
        path = picture_path(folder, entry.id)
        return path.is_file() and path.stat().st_size == entry.bytes and sha256_of(path) == entry.sha256

    entries = read_entries(folder, fingerprint)
    return {one: entry for one, entry in entries.items() if (among is None or one in among) and is_whole(entry)}


def batches_of(requested: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Split all images into batches of consecutive numbers, the same in every sharding."""
    return [requested[first : first + size] for first in range(0, len(requested), size)]


@dataclass
class ImageWriter(AbstractContextManager["ImageWriter"]):
    """Writes batches of images to a folder and records each in a manifest; a context manager.

    `name` is the name of its manifest, which no other process may write; `done` are the numbers of finished images.
    `shield` returns a context that defers signals while an image is written. ValueError for a folder with images of
    another fingerprint.
    """

    decoder: Generator
    folder: Path
    fingerprint: Mapping[str, Any]
    _: KW_ONLY
    name: str
    shield: Shield = nullcontext
    callback: Callback | None = None

    def __post_init__(self) -> None:
        self.done = set(finished(self.folder, self.fingerprint))
        self.manifest = JsonLines(self.folder / f"manifest-{self.name}.jsonl", self.fingerprint)

    def make(self, batch: Sequence[Request]) -> int:
        """Write the missing images of a batch, which is always decoded as a whole; return their number."""
        missing = [request for request in batch if request.number not in self.done]
        if missing and all(picture_path(self.folder, request.number).exists() for request in missing):
            # another worker may have finished them meanwhile
            self.done |= finished(self.folder, self.fingerprint, {request.number for request in missing}).keys()
        if all(request.number in self.done for request in batch):
            return 0
        made = make_batches(self.decoder, batch, with_pixels=True, callback=self.callback)
        return sum(self._keep(picture) for picture in made)

    def __exit__(self, *_: object) -> None:
        self.manifest.close()

    def _keep(self, picture: Picture) -> bool:
        """Write a missing image, then record it; return whether it was missing."""
        number = picture.request.number
        if number in self.done:
            return False
        assert picture.pixels is not None
        path, request, decoder = picture_path(self.folder, number), picture.request, self.decoder
        facts = {  # nothing in them differs between runs
            "prompt": request.prompt,
            "class": request.label,
            "model": decoder.model.name,
            "method": decoder.method.name,
            "settings": decoder.method.changed() or None,
            "seed": str(request.seed),
            "image": str(number),
            "sampling": asdict(decoder.sampling),
            "versions": {"lantern": lantern.__version__, "torch": torch.__version__},
            "tokens_sha256": picture.tokens_sha256,
        }
        with self.shield():
            save_image(to_image(picture.pixels), path, facts)
            raw = path.read_bytes()
            digest = hashlib.sha256(raw).hexdigest()
            entry = Entry(number, len(raw), digest, picture.tokens_sha256, asdict(picture.statistics))
            self.manifest.append(asdict(entry))
            self.done.add(number)
        return True


def produce(
    worker: ImageWriter, requested: Sequence[Request], *, shard: Shard, batch: int = 1, is_quiet: bool = False
) -> int:
    """Write the missing images of a shard, with a progress bar; return their number."""
    count, mine = 0, batches_of(requested, batch)[shard.number - 1 :: shard.count]
    already = sum(request.number in worker.done for some in mine for request in some)
    with images_bar(sum(map(len, mine)), already, is_quiet=is_quiet) as bar:
        for some in mine:
            made = worker.make(some)
            bar.update(made)
            count += made
    return count


def images_bar(total: int, done: int, *, is_quiet: bool = False) -> Any:
    """Return a progress bar over images, shown if stderr is a terminal."""
    return tqdm(total=total, initial=done, unit=" images", disable=is_quiet or None, dynamic_ncols=True)
