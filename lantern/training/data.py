"""Prepared data: pictures of one size, captions with weights, and what made them, in one small folder.

A folder holds `pictures.tar` (PNG files, numbered), `records.jsonl` (one record a line) and `summary.json`. `prepare`
writes it, `Prepared.open` reads it.
"""

import hashlib
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

SOURCES = ("emoji", "folder", "classes", "webdataset")
FILES = {"pictures.tar", "records.jsonl", "summary.json"}
KINDS = ("plain", "colour", "count", "pair")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DataConfig:
    """What to prepare. `source` is one of SOURCES; the other fields that it does not use are ignored.

    size: side of a picture in pixels. seed: of everything random. path: what a source other than emoji reads.
    concepts: lists of concepts. styles: which art. reserved: the evaluation prompts whose words no caption may hold.
    held_out: share of cells (emoji: concept and style; otherwise: pictures) kept from training. mirrors: add a
    mirror image of each plain picture; shifts: add so many shifted ones. colours, counts, pairs: how many
    composites to make. Relative paths are resolved against the file that the config is loaded from.
    """

    source: str = "emoji"
    size: int = 64
    seed: int = 0
    path: str = ""
    concepts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ("3d", "flat", "noto")
    reserved: str = ""
    held_out: float = 0.05
    mirrors: bool = False
    shifts: int = 0
    colours: int = 0
    counts: int = 0
    pairs: int = 0

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}, wanted one of {', '.join(SOURCES)}: change the config")
        if not 8 <= self.size <= 4096:
            raise ValueError(f"size is {self.size}, wanted 8 to 4096 pixels: change the config")
        if not 0 <= self.held_out < 0.5:
            raise ValueError(f"held_out is {self.held_out}, wanted at least 0 and less than 0.5")
        if min(self.seed, self.shifts, self.colours, self.counts, self.pairs) < 0:
            raise ValueError("seed, shifts, colours, counts and pairs must not be negative")
        unknown = set(self.styles) - {"3d", "flat", "noto"}
        if unknown or not self.styles:
            raise ValueError(f"styles are {list(self.styles)}, wanted some of 3d, flat, noto")
        if self.source == "emoji" and not self.concepts:
            raise ValueError("concepts is empty, wanted at least one list such as concepts-core.txt")
        if self.source != "emoji" and not self.path:
            raise ValueError(f"path is empty, wanted the {self.source} data to read")

    @classmethod
    def load(cls, path: Path) -> "DataConfig":
        """Read a JSON config. Raises ValueError, in one line, when the file or a field is not right."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: cannot be read as a JSON config: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: wanted a JSON object of fields, got {type(values).__name__}")
        known = {f.name: type(f.default) for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{path}: no field {name!r}; there are {', '.join(known)}")
            wanted = {tuple: list, float: (int, float)}.get(known[name], known[name])
            if not isinstance(value, wanted) or (isinstance(value, bool) != (known[name] is bool)):
                raise ValueError(f"{path}: {name} is {value!r}, wanted a {known[name].__name__}")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        config = cls(**given)
        home = path.resolve().parent
        return replace(
            config,
            path=str(home / config.path) if config.path else "",
            concepts=tuple(str(home / name) for name in config.concepts),
            reserved=str(home / config.reserved) if config.reserved else "",
        )


@dataclass(frozen=True)
class Record:
    """One picture and what may be said of it.

    image: its number. captions: (text, weight) pairs, weights summing to one. kind: one of KINDS. concepts: names, one
    for plain, colour and count, two for a pair (left, right), none where unknown. split: train or heldout.
    variant: original, mirror or shift. may_mirror: the mirror image is as good a picture. colour: the one it was
    given, or "". number: how many things it shows.
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
    """What a preparation made and from what; written as `summary.json`.

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
        return f"{self.records} pictures, {self.bytes / 2**20:.1f} MiB, {self.num_skipped} inputs left out"


@dataclass
class Writer:
    """Takes pictures and records one by one and writes them down at once; `close` completes the folder."""

    folder: Path
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        path = self.folder / "pictures.tar"
        self.tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 (closed by close)

    def add(self, picture: UInt8[np.ndarray, "h w 3"], record: Record) -> None:
        """Append a picture; the record's `image` is set to its number."""
        from PIL import Image

        buffer = BytesIO()
        Image.fromarray(picture).save(buffer, "PNG", compress_level=9)
        number = len(self.records)
        info = tarfile.TarInfo(f"{number:06d}.png")
        info.size = buffer.tell()
        buffer.seek(0)
        self.tar.addfile(info, buffer)
        self.records.append(replace(record, image=number))

    def close(self) -> None:
        """Finish the archive and write the records."""
        self.tar.close()
        with (self.folder / "records.jsonl").open("w", encoding="utf-8") as file:
            for record in self.records:
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data. Pictures are decoded when asked for."""

    folder: Path
    records: list[Record]
    summary: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> "Prepared":
        """Read a prepared folder. Raises ValueError when it is not one."""
        folder = Path(folder)
        try:
            lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            records = [record_of(json.loads(line)) for line in lines]
        except (OSError, json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{folder} holds no prepared data ({error}): make it with `lantern train data`") from error
        return cls(folder, records, summary)

    def image(self, number: int) -> UInt8[Tensor, "3 h w"]:
        """One picture by its number."""
        with tarfile.open(self.folder / "pictures.tar") as tar:
            file = tar.extractfile(f"{number:06d}.png")
            assert file is not None
            return decode_png(file.read())

    def images(self) -> UInt8[Tensor, "n 3 h w"]:
        """All pictures, in order of their numbers."""
        with tarfile.open(self.folder / "pictures.tar") as tar:
            files = (tar.extractfile(member) for member in tar)
            pictures = [decode_png(file.read()) for file in files if file is not None]
        if len(pictures) != len(self.records):
            raise ValueError(
                f"{self.folder}: {len(pictures)} pictures but {len(self.records)} records: prepare it again"
            )
        return torch.stack(pictures)


def record_of(values: dict[str, Any]) -> Record:
    """A record from its JSON form."""
    captions = tuple((text, weight) for text, weight in values.pop("captions"))
    return Record(captions=captions, concepts=tuple(values.pop("concepts")), **values)


def decode_png(data: bytes) -> UInt8[Tensor, "3 h w"]:
    """A PNG file's pixels, channels first."""
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def share_of(key: str) -> float:
    """A number in [0, 1) that depends on the key alone: the same on every machine, in every order."""
    return int(hashlib.md5(key.encode()).hexdigest()[:13], 16) / 16**13


def count_by(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """How many records there are of each kind, split and style."""
    listed = list(records)
    return {
        name: dict(sorted(Counter(getattr(r, name) for r in listed).items())) for name in ("kind", "split", "style")
    }


def prepare(config: DataConfig, *, out: Path, packages: Path, progress: Progress | None = None) -> Summary:
    """Prepare data into `out`, which is replaced as a whole once everything is written.

    packages: folder of npm archives, for the emoji source; missing ones are fetched into it. progress: called with
    (done, total), total 0 where it is not known.
    Raises ValueError, in one line, for wrong archives, a wrong path, or when no picture is usable.
    """
    from lantern.training.emoji_set import write_emoji
    from lantern.training.sources import write_source

    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= FILES):
        raise ValueError(f"{out} exists and is no prepared data: choose another folder or remove it")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    writer = Writer(partial)
    report = progress or (lambda done, total: None)
    try:
        if config.source == "emoji":
            skipped, used = write_emoji(config, writer, packages=packages, progress=report)
        else:
            skipped, used = write_source(config, writer, progress=report), []
        writer.close()
        if not writer.records:
            raise ValueError(
                f"{config.path or config.source}: no usable picture with a caption among "
                f"{len(skipped)}, first of them: {', '.join(skipped[:3]) or 'none'}"
            )
        summary = summarise(config, writer, skipped=skipped, packages=used)
        text = json.dumps(asdict(summary), indent=2, ensure_ascii=False)
        (partial / "summary.json").write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        writer.tar.close()
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def summarise(config: DataConfig, writer: Writer, *, skipped: list[str], packages: list[dict[str, str]]) -> Summary:
    """The summary of a finished writer."""
    with (writer.folder / "pictures.tar").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Summary(
        source=config.source,
        seed=config.seed,
        size=config.size,
        records=len(writer.records),
        concepts=len({name for record in writer.records for name in record.concepts}),
        counts=count_by(writer.records),
        num_skipped=len(skipped),
        skipped=tuple(skipped[:100]),
        packages=tuple(packages),
        sha256=digest,
        bytes=sum(path.stat().st_size for path in writer.folder.iterdir()),
    )
