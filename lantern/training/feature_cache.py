"""Pictures of a teacher with their features on disk: sharded safetensors, filled once, read at random.

A folder holds `00000.safetensors`, `00001.safetensors`, ...: shard k starts with image k * shard. Shards are written
to a temporary file and renamed, so that a stopped build continues with the first missing shard.
"""

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lantern.core.io import atomic_write
from lantern.training.teacher import AnyTeacher

SPARE = 1 << 26  # bytes of the disk that stay free
BATCH = 64  # pictures generated together


def format_bytes(size: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


class FeatureCache:
    """The first `pictures` images of a teacher, `shard` per file."""

    def __init__(self, folder: Path, *, pictures: int, shard: int) -> None:
        self.folder, self.pictures, self.shard = folder, pictures, shard

    @property
    def shards(self) -> range:
        """Numbers of the files."""
        return range(-(-self.pictures // self.shard))

    def estimate(self, teacher: AnyTeacher) -> int:
        """Return the bytes of the tensors of all images."""
        each = sum(math.prod(shape) * dtype.itemsize for shape, dtype in teacher.shapes().values())
        return each * self.pictures

    def fill(self, teacher: AnyTeacher) -> None:
        """Generate the missing shards, each of several processes its share, and print the disk space it takes.

        ValueError if the disk has less space.
        """
        from accelerate import PartialState

        missing = [number for number in self.shards if not self._path(number).exists()]
        if not missing:
            return
        state = PartialState(cpu=not torch.cuda.is_available())
        if state.is_main_process:
            self._announce(teacher, len(missing) / len(self.shards))
        with state.split_between_processes(missing) as mine:
            self._make(teacher, cast(Sequence[int], mine), is_quiet=not state.is_main_process)
        state.wait_for_everyone()

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of these images."""
        from safetensors import safe_open

        rows: dict[int, dict[str, Tensor]] = {}
        for shard in sorted({number // self.shard for number in numbers}):
            with safe_open(self._path(shard), framework="pt") as file:
                parts: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for number in {n for n in numbers if n // self.shard == shard}:
                    at = number % self.shard
                    rows[number] = {name: part[at : at + 1] for name, part in parts.items()}
        return {name: torch.cat([rows[number][name] for number in numbers]) for name in rows[numbers[0]]}

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def _announce(self, teacher: AnyTeacher, share: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        total, free = self.estimate(teacher), shutil.disk_usage(self.folder).free
        each = format_bytes(total / self.pictures)
        text = f"feature cache {self.folder}: {self.pictures} images of {each}, {format_bytes(total)}"
        print(f"{text}; {format_bytes(total * share)} to write, {format_bytes(free)} free", file=sys.stderr)
        if total * share + SPARE > free:
            advice = 'use fewer images, or "source": "online"'
            raise ValueError(f"{text} do not fit on a disk with {format_bytes(free)} left: {advice}")

    def _make(self, teacher: AnyTeacher, shards: Sequence[int], *, is_quiet: bool) -> None:
        from safetensors.torch import save_file
        from tqdm import tqdm

        todo = {s: range(s * self.shard, min(self.pictures, (s + 1) * self.shard)) for s in shards}
        total = sum(len(numbers) for numbers in todo.values())
        with tqdm(total=total, desc="pictures", unit="picture", disable=True if is_quiet else None) as bar:
            for shard, numbers in todo.items():
                parts = []
                for start in range(0, len(numbers), BATCH):
                    some = numbers[start : start + BATCH]
                    parts.append({name: x.cpu() for name, x in teacher.read(some).items()})
                    bar.update(len(some))
                with atomic_write(self._path(shard)) as temporary:
                    save_file({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, temporary)
