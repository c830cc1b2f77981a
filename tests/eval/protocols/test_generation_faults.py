"""Generation for evaluation under kills and full disks: finished images stay, and files are the same."""

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lantern.eval.protocols.generation import finished
from lantern.generation.generator import Generator
from tests.eval import workers
from tests.eval.workers import contents, lines, paint

PICTURES = 40
KILLS = int(os.environ.get("LANTERN_KILLS", "4"))


def begun(out: Path) -> list[int]:
    """Return the images that workers have started, in order, with repetitions."""
    log = Path(f"{out}.log")
    return list(map(int, log.read_text().split())) if log.exists() else []


def live(folder: Path, out: Path, batch: int, *, begins: int | None = None, wait: float = 0) -> int:
    """Run one worker and return its exit code; killed `wait` seconds after `begins` more images."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([workers.__name__])
    count = len(begun(out)) + (begins or 0)
    process = context.Process(target=workers.live, args=(folder, out, Path(f"{out}.log"), PICTURES, batch))
    process.start()
    if begins is not None:
        until = time.monotonic() + 60
        while len(begun(out)) < count and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(wait)
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are tried with forked processes, which this system has not")
def test_every_picture_exists_once_after_random_kills(folder: Path, tmp_path: Path) -> None:
    """LANTERN_KILLS=20 kills twenty times."""
    batch, lot, whole, out = 4, random.Random(4), tmp_path / "whole", tmp_path / "killed"
    assert live(folder, tmp_path / "first", batch) == 0  # also starts the fork server, which takes seconds
    start = time.perf_counter()
    assert live(folder, whole, batch) == 0
    one = (time.perf_counter() - start) * batch / PICTURES
    codes = []
    for _ in range(KILLS):
        codes.append(live(folder, out, batch, begins=lot.randint(0, 30 // KILLS), wait=lot.uniform(0, 1.5 * one)))
    killed = codes.count(-signal.SIGKILL)
    assert killed >= KILLS - 1
    assert live(folder, out, batch) == 0
    assert contents(out) == contents(whole) and len(contents(out)) == PICTURES
    assert lines(out) == list(range(PICTURES))
    again = len(begun(out)) - PICTURES
    assert set(begun(out)) == set(range(PICTURES)) and again <= killed * batch
    assert not (out / "staging").exists()
    print(f"{killed} kills, {again} images begun again")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a quota does: no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_finished_pictures(decoder: Generator, whole: Path, tmp_path: Path) -> None:
    size = (whole / "manifest-1-of-1.jsonl").stat().st_size
    out = tmp_path / "out"
    with files_of_at_most(size // 2), pytest.raises(OSError, match=r"manifest-1-of-1\.jsonl"):
        paint(decoder, out, 12)
    done = lines(out)
    assert 0 < len(done) < 12 and sorted(finished(out)) == done
    assert paint(decoder, out, 12) == 12 - len(done)
    assert contents(out) == contents(whole) and lines(out) == list(range(12))


def test_a_full_disk_leaves_no_partial_picture(decoder: Generator, tmp_path: Path) -> None:
    with files_of_at_most(600), pytest.raises(OSError, match="large|space") as raised:
        paint(decoder, tmp_path / "out", 2)
    assert str(raised.value.filename).endswith("000000.png")
    assert not contents(tmp_path / "out") and not lines(tmp_path / "out")
