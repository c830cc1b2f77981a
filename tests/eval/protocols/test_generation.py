"""Generation for evaluation: any sharding, any resume, kills, full disks and actors of Ray give the same files."""

import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lantern.core.sampling import Sampling
from lantern.engines.engine import EAGER
from lantern.eval.json_lines import JsonLines
from lantern.eval.protocols import generation
from lantern.eval.protocols.generation import ImageWriter, Shard, finished, picture_path, produce, read_entries
from lantern.eval.protocols.ray_job import Actor, RayJob, cluster, produce_on_ray, received, sendable, shares
from lantern.generation.generator import Generator
from lantern.generation.images import NotFiniteError, Statistics
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.eval import workers
from tests.eval.workers import FINGERPRINT, Patch, contents, expected, files_of_at_most, lines, paint, tiny_decoder
from tests.refusals import refused


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Generator:
    return tiny_decoder(folder)


@pytest.fixture(scope="module")
def whole(decoder: Generator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert paint(decoder, out, 12) == 12
    return out


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2"])
def test_invalid_shards_are_rejected(text: str) -> None:
    refused(Shard.parse, text, match="wanted i/n")


def test_shards_and_another_number_of_them_match_one_run(decoder: Generator, whole: Path, tmp_path: Path) -> None:
    made = [paint(decoder, tmp_path / "four", 12, shard=Shard(i, 4), batch=3) for i in (4, 2, 1, 3)]
    assert sum(made) == 12 and min(made) >= 2
    paint(decoder, tmp_path / "three", 12, shard=Shard(2, 3))
    assert sum(paint(decoder, tmp_path / "three", 12, shard=Shard(i, 2)) for i in (1, 2)) == 8
    for out in (tmp_path / "four", tmp_path / "three"):
        assert contents(out) == contents(whole) and lines(out) == list(range(12))


def test_a_second_process_on_the_same_shard_is_reported(decoder: Generator, tmp_path: Path) -> None:
    with (
        ImageWriter(decoder, tmp_path, FINGERPRINT, name="1-of-1"),
        pytest.raises(BlockingIOError, match=r"another process is writing it.*manifest-1-of-1\.jsonl"),
    ):
        ImageWriter(decoder, tmp_path, FINGERPRINT, name="1-of-1")


def test_a_file_system_without_locks_is_not_called_another_process(tmp_path: Path, monkeypatch: Patch) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", no_lock)
    with pytest.raises(OSError, match=r"cannot be locked: Operation not supported.*x\.jsonl"):
        JsonLines(tmp_path / "x.jsonl", FINGERPRINT)


def test_deleted_truncated_or_damaged_pictures_are_made_again_in_whole_batches(
    decoder: Generator, tmp_path: Path, monkeypatch: Patch
) -> None:
    paint(decoder, tmp_path, 8, batch=4)
    before = contents(tmp_path)
    picture_path(tmp_path, 5).unlink()
    os.truncate(picture_path(tmp_path, 6), 20)
    damaged = picture_path(tmp_path, 7)
    damaged.write_bytes(damaged.read_bytes()[:-20] + b"\0" * 20)
    assert set(finished(tmp_path)) == set(range(5))
    begun, real = list[int](), generation.make_batches

    def noting(decoder: Generator, requested: list, **how: Any) -> Iterator:
        begun.extend(request.number for request in requested)
        return real(decoder, requested, **how)

    monkeypatch.setattr(generation, "make_batches", noting)
    assert paint(decoder, tmp_path, 8, batch=4) == 3
    assert begun == [4, 5, 6, 7] and contents(tmp_path) == before


def test_pictures_made_meanwhile_are_skipped(decoder: Generator, tmp_path: Path, monkeypatch: Patch) -> None:
    with ImageWriter(decoder, tmp_path, FINGERPRINT, name="early") as early:
        with ImageWriter(decoder, tmp_path, FINGERPRINT, name="late") as late:
            assert produce(late, expected(3), shard=Shard(), is_quiet=True) == 3
        monkeypatch.setattr(generation, "make_batches", lambda *_, **__: pytest.fail("an image was begun"))
        assert produce(early, expected(3), shard=Shard(), is_quiet=True) == 0


def test_a_picture_states_how_it_was_made(whole: Path) -> None:
    with Image.open(picture_path(whole, 1)) as picture:
        stated = dict(picture.info)
    assert (stated["prompt"], stated["image"], stated["method"]) == ("a blue cat", "1", "gumbel-jacobi")
    entry = read_entries(whole)[1]
    assert entry.tokens_sha256 == stated["tokens_sha256"]
    assert isinstance(entry.figures(), Statistics) and entry.figures().tokens_per_step > 1


PICTURES = 40
KILLS = int(os.environ.get("LANTERN_KILLS", "4"))


def begun(out: Path) -> list[int]:
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
    print(f"{killed} kills, {again} images begun again")


def test_a_full_disk_keeps_finished_pictures(decoder: Generator, whole: Path, tmp_path: Path) -> None:
    size = (whole / "manifest-1-of-1.jsonl").stat().st_size
    out = tmp_path / "out"
    with files_of_at_most(size // 2), pytest.raises(OSError, match=r"manifest-1-of-1\.jsonl"):
        paint(decoder, out, 12)
    done = lines(out)
    assert 0 < len(done) < 12 and sorted(finished(out)) == done
    assert paint(decoder, out, 12) == 12 - len(done)
    assert contents(out) == contents(whole) and lines(out) == list(range(12))


@pytest.mark.parametrize(("line", "left"), [(0, 20), *((2, left) for left in range(1, 200, 23))])
def test_an_incomplete_line_is_dropped_and_written_anew(whole: Path, tmp_path: Path, line: int, left: int) -> None:
    path, entries = tmp_path / "manifest-1-of-1.jsonl", read_entries(whole)
    lines = (whole / path.name).read_bytes().splitlines(keepends=True)  # the first is the header
    path.write_bytes(b"".join([*lines[:line], lines[line][:left]]))
    assert set(read_entries(tmp_path, FINGERPRINT)) == set(range(line - 1))
    with JsonLines(path, FINGERPRINT) as manifest:
        for number in range(max(line - 1, 0), len(entries)):
            manifest.append(asdict(entries[number]))
    assert path.read_bytes() == b"".join(lines)


LONG = "x" * 60
HERE = {"weights": {"model": "a"}, "sizes": (1, 2)}


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ({}, {"weights": {"model": "other"}}, r"weights\.model a, now it is other: use another --out"),
        ({}, {"weights": {"model": "a", "policy": "p"}}, r"weights\.policy none, now it is p"),
        ({"drafter": LONG + "a", "name": "a"}, {"drafter": LONG + "b", "name": "b"}, "name a, now it is b"),
    ],
)
def test_another_fingerprint_is_rejected_by_a_difference_that_shows(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    path = tmp_path / "manifest-1-of-1.jsonl"
    JsonLines(path, HERE | was).close()
    assert read_entries(tmp_path, HERE | was | {"sizes": [1, 2]}) == {}  # tuples are lists in a file
    for read in (lambda: JsonLines(path, HERE | now), lambda: read_entries(tmp_path, HERE | now)):
        refused(read, match=f"begun with {message}")


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"id": 3}\n', b"[" * 100_000 + b"\n"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "manifest-1-of-1.jsonl").write_bytes(b'{"fingerprint": {}}\n' + line)
    refused(read_entries, tmp_path, match=r"manifest-1-of-1\.jsonl, line 2 is .*delete that line")


class Noted(RayJob):
    """A recipe whose workers leave their names and process numbers in the folder's `pids`."""

    def worker(self, name: str, **watching: Any) -> ImageWriter:
        with open(self.folder.with_name("pids"), "a") as file:
            file.write(f"{name} {os.getpid()}\n")
        return super().worker(name, **watching)


def recipe(folder: Path, out: Path) -> RayJob:
    method = METHODS["gumbel-jacobi"].with_options(window=4)
    sampling = load_model(folder, device="cpu").sampling()
    return Noted(str(folder), "cpu", "fp32", method, sampling, EAGER, out, FINGERPRINT, torch.get_num_threads())


@pytest.mark.parametrize(("cpus", "actors"), [(2, 2), (1, 1), (1, 2), (64, 2), (3, 50)])
def test_actors_share_the_gpus_and_leave_cpus_for_rays_own_tasks(cpus: float, actors: int) -> None:
    requested = shares({"CPU": cpus}, actors)
    assert 0 < requested["num_cpus"] <= 1 and requested["num_cpus"] * actors < cpus and "num_gpus" not in requested
    assert shares({"CPU": cpus, "GPU": 2.0}, actors)["num_gpus"] == min(1.0, 2.0 / actors)


def test_an_error_keeps_its_type() -> None:
    full = received(sendable(OSError(28, "No space left on device", "out/1.png")))
    assert isinstance(full, OSError) and full.errno == 28 and full.filename == "out/1.png"
    lost = received(sendable(NotFiniteError("the distribution became NaN", [object()])))  # type: ignore[list-item]
    assert isinstance(lost, FloatingPointError) and str(lost) == "the distribution became NaN"

    class Local(Exception):
        pass

    assert "Local: no" in str(received(sendable(Local("no"))))


def test_actors_that_keep_ending_stop_the_job(tmp_path: Path) -> None:
    for life in range(4):
        (tmp_path / f"manifest-job-{life}.jsonl").touch()
    nothing = RayJob("none", "cpu", "fp32", METHODS["plain"], Sampling(), EAGER, tmp_path, FINGERPRINT, 1)
    answer = Actor(nothing, [expected(1)], "job", 4)({"number": [0]})
    assert answer["made"][0] == 0 and "4 actors ended" in str(received(answer["failure"][0]))


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    with cluster():
        yield


class Killer(threading.Thread):
    """Kills an actor after it has recorded images, so that another one makes the rest."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out, self.killed = out, 0

    def run(self) -> None:
        until = time.monotonic() + 600
        while not self.killed and time.monotonic() < until:
            if len(lines(self.out)) >= 2:
                actors = dict(line.split() for line in self.out.with_name("pids").read_text().splitlines())
                manifests = {name: self.out / f"manifest-{name}.jsonl" for name in actors}
                recorded = {name: path.stat().st_size for name, path in manifests.items() if path.is_file()}
                self.killed = int(actors[max(recorded, key=recorded.__getitem__)])
                os.kill(self.killed, signal.SIGKILL)
            time.sleep(0.01)


@pytest.mark.filterwarnings("ignore")
def test_two_actors_with_one_killed_match_one_process(folder: Path, ray_here: None, tmp_path: Path) -> None:
    decoder = tiny_decoder(folder)
    paint(decoder, tmp_path / "here", PICTURES)
    out = tmp_path / "ray"
    killer = Killer(out)
    killer.start()
    made = produce_on_ray(recipe(folder, out), expected(PICTURES), actors=2, is_quiet=True)
    killer.join(1)
    assert killer.killed
    assert contents(out) == contents(tmp_path / "here")
    # the picture at which the actor was killed may be recorded but not reported
    assert PICTURES - 1 <= made <= PICTURES and set(lines(out)) == set(range(PICTURES))
    assert len(list(out.glob("manifest-ray-*.jsonl"))) >= 2
    assert produce_on_ray(recipe(folder, out), expected(PICTURES), actors=2, is_quiet=True) == 0


@pytest.mark.filterwarnings("ignore")
def test_a_job_resumes_a_shard_and_a_shard_resumes_a_job(folder: Path, ray_here: None, tmp_path: Path) -> None:
    decoder = tiny_decoder(folder)
    paint(decoder, tmp_path / "here", 8)
    paint(decoder, tmp_path / "out", 3)
    assert produce_on_ray(recipe(folder, tmp_path / "out"), expected(6), actors=1, is_quiet=True) == 3
    assert paint(decoder, tmp_path / "out", 8) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "here") and len(finished(tmp_path / "out")) == 8


@pytest.mark.filterwarnings("ignore")
def test_write_errors_of_actors_are_raised_here(folder: Path, ray_here: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "pictures").write_text("in the way")
    with pytest.raises(OSError, match="pictures") as raised:
        produce_on_ray(recipe(folder, out), expected(2), actors=1, is_quiet=True)
    assert not isinstance(raised.value, ImportError)
