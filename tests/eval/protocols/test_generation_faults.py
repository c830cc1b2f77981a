"""Generation for evaluation under kills and full disks: finished images stay, and files are the same."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lantern.eval.protocols.generation import finished
from lantern.generation.generator import Generator
from tests.eval.workers import contents, lines, paint

ROOT = Path(__file__).resolve().parents[3]
PICTURES = 40
KILLS = int(os.environ.get("LANTERN_KILLS", "4"))


def begun(out: Path) -> list[int]:
    """Return the images that workers have started, in order, with repetitions."""
    log = Path(f"{out}.log")
    return list(map(int, log.read_text().split())) if log.exists() else []


class Painters:
    """The process of `tests.eval.workers`."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.eval.workers", str(model)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "warm"

    def live(self, out: Path, batch: int, *, begins: int | None = None, wait: float = 0) -> int:
        """Run one worker and return its exit code; killed `wait` seconds after `begins` more images."""
        assert self._process.stdin is not None
        requested = {"out": str(out), "log": f"{out}.log", "pictures": PICTURES, "batch": batch, "shard": "1/1"}
        print(json.dumps(requested), file=self._process.stdin, flush=True)
        child = int(self._answer())
        if begins is not None:
            self._watch(out, len(begun(out)) + begins)
            time.sleep(wait)
            with suppress(ProcessLookupError):  # it was faster
                os.kill(child, signal.SIGKILL)
        return int(self._answer())

    def _watch(self, out: Path, count: int) -> None:
        until = time.monotonic() + 60
        while len(begun(out)) < count and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def painters(folder: Path) -> Iterator[Painters]:
    if not hasattr(os, "fork"):
        pytest.skip("kills are tried with forked processes, which this system has not")
    serving = Painters(folder)
    yield serving
    serving.close()


@pytest.mark.parametrize("batch", [1, 4])
def test_every_picture_exists_once_after_random_kills(painters: Painters, tmp_path: Path, batch: int) -> None:
    """LANTERN_KILLS=20 kills twenty times."""
    lot, whole, out = random.Random(batch), tmp_path / "whole", tmp_path / "killed"
    start = time.perf_counter()
    assert painters.live(whole, batch) == 0
    one = (time.perf_counter() - start) * batch / PICTURES
    tokens = []
    for _ in range(KILLS):
        tokens.append(painters.live(out, batch, begins=lot.randint(0, 30 // KILLS), wait=lot.uniform(0, 1.5 * one)))
    killed = tokens.count(-signal.SIGKILL)
    assert killed >= KILLS - 1
    assert painters.live(out, batch) == 0
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
