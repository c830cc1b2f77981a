"""Workers that make tiny images, in this process or in one that a test kills, and contenders of a race."""

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.eval.protocols import generation
from lantern.eval.protocols.generation import ImageWriter, Shard, produce
from lantern.eval.speed.contenders import PLAIN, Contender, Stable, Variant, built, line_up
from lantern.generation.generator import Generator
from lantern.generation.requests import Request
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model

FINGERPRINT = {"weights": {"model": "tiny"}, "config": {"batch": 1}, "versions": {"torch": torch.__version__}}
Patch = pytest.MonkeyPatch
PROMPTS = ("a red apple", "a blue cat", "two dog", "a cat and a dog")


def expected(pictures: int) -> list[Request]:
    return [Request(prompt=PROMPTS[i % len(PROMPTS)], seed=7, number=i) for i in range(pictures)]


def tiny_decoder(model: str | Path) -> Generator:
    """Return a decoder of a method without a drafter model."""
    loaded = load_model(model, device="cpu")
    return Generator(loaded, METHODS["gumbel-jacobi"].with_options(window=4), loaded.sampling(), batch=64)


def paint(decoder: Generator, out: Path, pictures: int, *, shard: Shard | None = None, batch: int = 1) -> int:
    shard = shard or Shard()
    with ImageWriter(decoder, out, FINGERPRINT, name=shard.name) as worker:
        return produce(worker, expected(pictures), batch=batch, shard=shard, is_quiet=True)


def contents(out: Path) -> dict[str, bytes]:
    """Return every image below the images' folder, without temporary files that kills left."""
    places = (path for path in (out / "pictures").rglob("*") if path.is_file() and path.name[0] != ".")
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in places}


def lines(out: Path) -> list[int]:
    """Return the image numbers in the manifests, with repetitions."""
    found = [json.loads(line) for path in out.glob("manifest-*.jsonl") for line in path.read_text().splitlines()]
    return sorted(line["id"] for line in found if "id" in line)


def live(model: Path, out: Path, log: Path, pictures: int, batch: int) -> None:
    """Run one worker in a process of its own; log the number of every image that is started, one a line."""
    torch.set_num_threads(1)
    begin = generation.make_batches

    def noting(decoder: Generator, requested: Sequence[Request], **how: object) -> object:
        with open(log, "a") as file:
            file.write("".join(f"{request.number}\n" for request in requested))
        return begin(decoder, requested, **how)  # type: ignore[arg-type]

    generation.make_batches = noting  # type: ignore[assignment]
    paint(tiny_decoder(model), out, pictures, batch=batch)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a quota does: no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


CPU = torch.device("cpu")
EAGER = Variant("eager", "fp32")


def eager(model: Model, *labels: str) -> list[Contender]:
    """Plain decoding and these methods, eagerly, without a warm-up."""
    build: Any = built(model.sampling())
    return line_up(Stable(model), [(label, EAGER) for label in (PLAIN, *labels)], build, lambda one: None, [])
