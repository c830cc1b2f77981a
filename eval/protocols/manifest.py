"""Manifests of finished images: append-only JSON lines, one per image, after a header with the fingerprint.

    {"fingerprint": {"weights": ..., "config": ..., "versions": ...}}
    {"id": 0, "bytes": 5120, "sha256": ..., "tokens_sha256": ..., "statistics": {...}}

A folder has one manifest per writer, named after its shard, so no two processes write to one file. Together they
list all finished images. Images of another fingerprint are rejected. A line is written after its image and
flushed to disk; an incomplete last line, left by a kill, is removed when the writer resumes.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lantern.generation.images import Statistics

PATTERN = "manifest-*.jsonl"
NAME = re.compile(r"[a-z0-9-]{1,64}")
LOCKED_BYTE = 1 << 40  # far beyond the end of the file: on some systems a locked byte cannot be read


@dataclass(frozen=True)
class Entry:
    """A finished image: number in the set, size and sha256 of its file, sha256 of its codes, statistics.

    `statistics` holds the fields of `lantern.generation.images.Statistics`.
    """

    id: int
    bytes: int
    sha256: str
    tokens_sha256: str
    statistics: Mapping[str, Any]

    def figures(self) -> Statistics:
        """Return the statistics of the image."""
        given = dict(self.statistics)
        for name in ("accepted", "reached"):
            given[name] = tuple(given[name])
        return Statistics(**given)


class Manifest:
    """One writer's manifest, open for appending and locked against other processes until it is closed.

    ValueError for images of another fingerprint in the folder. BlockingIOError if another process writes the file.
    """

    def __init__(self, folder: Path, name: str, fingerprint: Mapping[str, Any]) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"manifest name is {name[:40]!r}, expected lower-case letters, digits and hyphens")
        self.path = folder / f"manifest-{name}.jsonl"
        read_entries(folder, fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - open until close()
        try:
            _lock(self._file, self.path)
            self._size = self._drop_torn_line()
            if not self._size:
                self._write({"fingerprint": fingerprint})
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: Entry) -> None:
        """Append one line; on OSError the file is unchanged."""
        self._write(asdict(entry))

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):  # a nearly full disk accepts a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(self._size)
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        self._size += len(line)

    def _drop_torn_line(self) -> int:
        """Remove an incomplete last line; return the remaining size in bytes."""
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return whole


def read_entries(folder: Path, fingerprint: Mapping[str, Any] | None = None) -> dict[int, Entry]:
    """Return the entries of all manifests of a folder by number; incomplete last lines are ignored.

    ValueError for a damaged line and, if `fingerprint` is given, for images of another one.
    """
    entries: dict[int, Entry] = {}
    for path in sorted(folder.glob(PATTERN)):
        lines = _whole_lines(path)
        header = next(lines, None)
        if header is None:
            continue
        if not isinstance(header.get("fingerprint"), dict):
            raise ValueError(f"{path} is not a manifest of images: choose another folder")
        if fingerprint is not None:
            check_fingerprint(header["fingerprint"], fingerprint, path)
        for number, line in enumerate(lines, start=2):
            try:
                entry = Entry(**line)
            except TypeError as error:
                raise ValueError(f"{path}, line {number} is not an entry of an image: delete that line") from error
            entries[entry.id] = entry
    return entries


def check_fingerprint(there: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if the recorded fingerprint differs from the current one; the message names the difference."""
    was, now = _flat(there), _flat(json.loads(json.dumps(here)))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"{path.parent} has images with {name} {_short(was.get(name))}, now it is "
                f"{_short(now.get(name))}: use another --out or the same settings"
            )


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, without an incomplete last line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: delete that line") from error
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object: delete that line")
            yield value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:40]


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file for this process until it is closed or the process ends."""
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "another process is writing it: wait for it, or stop it"
        raise BlockingIOError(error.errno, why, str(path)) from error
