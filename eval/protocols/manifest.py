"""Manifests of finished images: JSON lines (`lantern.eval.json_lines`), one per image.

    {"fingerprint": {"weights": ..., "config": ..., "versions": ...}}
    {"id": 0, "bytes": 5120, "sha256": ..., "prompt_sha256": ..., "statistics": {...}}

A folder has one manifest per writer, named after its shard, so no two processes write to one file. Together they
list all finished images. A line is written after its image.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern.eval.json_lines import read_lines
from lantern.generation.images import Statistics

PATTERN = "manifest-*.jsonl"


@dataclass(frozen=True)
class Entry:
    """A finished image: number in the set, size and sha256 of its file, sha256 of its tokens, statistics.

    `statistics` holds the fields of `lantern.generation.images.Statistics`.
    """

    id: int
    bytes: int
    sha256: str
    prompt_sha256: str
    statistics: Mapping[str, Any]

    def figures(self) -> Statistics:
        """Return the statistics of the image."""
        given = dict(self.statistics)
        for name in ("accepted", "reached"):
            given[name] = tuple(given[name])
        return Statistics(**given)


def read_entries(folder: Path, fingerprint: Mapping[str, Any] | None = None) -> dict[int, Entry]:
    """Return the entries of all manifests of a folder by number.

    ValueError for a damaged line and, if `fingerprint` is given, for images of another one.
    """
    entries: dict[int, Entry] = {}
    for path in sorted(folder.glob(PATTERN)):
        for number, line in enumerate(read_lines(path, fingerprint)[1], start=2):
            try:
                entry = Entry(**line)
            except TypeError as error:
                raise ValueError(f"{path}, line {number} is not an entry of an image: delete that line") from error
            entries[entry.id] = entry
    return entries
