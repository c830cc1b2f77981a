"""Generation as a Ray job: two actors on a local Ray, one of them killed."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.engines.engine import EAGER
from lantern.eval.protocols.generation import ImageWriter, finished
from lantern.eval.protocols.ray_job import Actor, RayJob, cluster, produce_on_ray, received, sendable, shares
from lantern.generation.images import NotFiniteError
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.eval.workers import FINGERPRINT, contents, expected, lines, paint, tiny_decoder

PICTURES = 40


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
