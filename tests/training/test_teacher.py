"""The feature cache holds the teacher's output, has the announced size, and a stopped build continues."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lantern.training.drafter import DrafterConfig, DrafterTask, FeatureCache, Teacher
from lantern.training.loop import LoopConfig
from tests.tiny import tiny_target, tiny_teacher

LOOP = LoopConfig(steps=4, warmup=1, precision="fp32", log_every=1, evaluate_every=4)
CONFIG = DrafterConfig(loop=LOOP, batch=4, lr=1e-2, unroll=2, pictures=12, held_out=3, shard=5)


def filled(folder: Path, teacher: Teacher, pictures: int = 12, shard: int = 5) -> FeatureCache:
    cache = FeatureCache(folder, pictures=pictures, shard=shard)
    cache.fill(teacher)
    return cache


@pytest.mark.parametrize("reads", [(), ("prompt",), ("layers", "prompt")])
def test_cache_holds_the_output_of_the_teacher(tmp_path: Path, reads: tuple[str, ...]) -> None:
    teacher = tiny_teacher(tiny_target(), reads)
    cache = filled(tmp_path, teacher)
    numbers = [11, 0, 7, 7, 4]
    read, output = cache.read(numbers), teacher.read(numbers)
    assert read.keys() == output.keys() == {"tokens", "mask", "words", "rows", *reads}
    assert torch.equal(read["tokens"], output["tokens"])
    for name in output:
        assert read[name].shape == output[name].shape and read[name].dtype == output[name].dtype
        torch.testing.assert_close(read[name].float(), output[name].float(), atol=2e-2, rtol=2e-2)


def test_files_are_as_large_as_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = tiny_teacher(tiny_target(), ("layers",))
    filled(tmp_path, teacher)
    held = sum(path.stat().st_size for path in tmp_path.iterdir())
    found = re.search(r"12 images, ([\d.]+)kB to write, .* free", capsys.readouterr().err)
    assert found and 0 <= held - 1000 * float(found[1]) < 1024 * 3 + 1000


def test_a_disk_with_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(ValueError, match=r"do not fit on a disk with 1.05MB left.*online"):
        filled(tmp_path / "cache", tiny_teacher(tiny_target()))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_stopped_build_continues_with_the_first_missing_shard(tmp_path: Path) -> None:
    class Watched(Teacher):
        made: list[int]

        def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
            if len(self.made) >= 3:  # the first is for the size
                raise KeyboardInterrupt
            self.made.append(len(numbers))
            return super().read(numbers)

    teacher = tiny_teacher(tiny_target())
    teacher.__class__, teacher.made = Watched, []  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, teacher)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.safetensors", "00001.safetensors"]
    teacher.made = []  # type: ignore[attr-defined]
    cache = filled(tmp_path, teacher)
    assert teacher.made == [1, 2]  # type: ignore[attr-defined]
    assert len(cache.read(list(range(12)))["tokens"]) == 12


def test_online_batches_are_fresh_and_repeatable() -> None:
    target = tiny_target()
    task = DrafterTask(replace(CONFIG, source="online", pictures=0), target, tiny_teacher(target))
    first, again, second = (task.batch(step, 0, torch.device("cpu"))[0] for step in (0, 0, 1))
    other = task.batch(0, 1, torch.device("cpu"))[0]
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.rows, again.rows)
    assert not torch.equal(first.tokens, second.tokens) and not torch.equal(first.tokens, other.tokens)
