"""Generation on many machines: a Ray Data job over the batches of `lantern.eval.protocols.generation`.

Each actor of a pool loads one model, processes batches, and records images in its own manifest, in a folder that all
machines share. An interrupted job resumes when it is run again, with or without Ray. A killed actor loses its current
batch; Ray starts another actor, which reads the manifests first.
"""

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lantern.core.config import one_line
from lantern.core.process import cluster, machines
from lantern.core.sampling import Sampling
from lantern.engines.engine import Engine
from lantern.eval.protocols.generation import ImageWriter, batches_of, finished, images_bar
from lantern.generation.generator import Generator
from lantern.generation.requests import Request
from lantern.methods import Method
from lantern.models.folder import load_model

RETRIES = 3  # restarts per actor in a job
SHARE = 0.8  # share of the CPUs for actors: Ray Data's own tasks need some and hang without
KINDS = (OSError, ValueError, MemoryError, FloatingPointError, ImportError)  # error types that keep their type
BLOCKS = 4096  # largest number of tasks; a task is one or more batches


@dataclass(frozen=True)
class RayJob:
    """Everything an actor needs to make images, as plain values that can be sent to another machine."""

    model: str
    device: str
    dtype: str
    method: Method
    sampling: Sampling
    engine: Engine
    folder: Path
    fingerprint: Mapping[str, Any]
    threads: int

    def worker(self, name: str, **watching: Any) -> ImageWriter:
        """Load the model and open a manifest of this name; `watching` is passed to `ImageWriter`."""
        torch.set_num_threads(self.threads)
        model = load_model(self.model, device=self.device, dtype=self.dtype, engine=self.engine)
        decoder = Generator(model, self.method, self.sampling, batch=1 << 20)
        return ImageWriter(decoder, self.folder, self.fingerprint, name=name, **watching)


class Actor:
    """A model that makes batches by their numbers; errors are returned, since Ray keeps only an exception's text."""

    def __init__(self, recipe: RayJob, batches: Sequence[Sequence[Request]], job: str, lives: int) -> None:
        self._worker, self._batches, self._failure = None, batches, ""
        try:
            # Ray restarts actors without limit, so a batch that kills its process would be retried forever
            spent = len(list(recipe.folder.glob(f"manifest-{job}-*.jsonl")))
            if spent >= lives:
                raise RuntimeError(f"{spent} actors ended unexpectedly: see Ray's logs, or run without --ray")
            self._worker = recipe.worker(f"{job}-{uuid.uuid4().hex[:8]}")
        except Exception as error:  # raised again in the process that started the job
            self._failure = sendable(error)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Make the batch of a row, which is one since `batch_size` is 1; return the number of images and the error."""
        made, failure, (number,) = 0, self._failure, rows["number"]
        if self._worker is not None:
            try:
                made = self._worker.make(self._batches[int(number)])
            except Exception as error:  # raised again in the process that started the job
                failure = sendable(error)
        return {"made": np.array([made]), "failure": np.array([failure], object)}


def sendable(error: Exception) -> str:
    """Return an exception as JSON: type and message."""
    kind = next((kind.__name__ for kind in KINDS if isinstance(error, kind)), "RuntimeError")
    message = str(error) if isinstance(error, KINDS) else f"{type(error).__name__}: {one_line(error)}"
    words: list[object] = [message]
    if isinstance(error, OSError) and error.errno is not None:
        words = [error.errno, error.strerror, error.filename]
    return json.dumps({"kind": kind, "words": [word if isinstance(word, int | None) else str(word) for word in words]})


def received(text: str) -> Exception:
    """Return the exception that `sendable` serialised."""
    values = json.loads(text)
    return {kind.__name__: kind for kind in KINDS}.get(values["kind"], RuntimeError)(*values["words"])


def produce_on_ray(
    recipe: RayJob,
    requested: Sequence[Request],
    *,
    batch: int = 1,
    actors: int | None = None,
    address: str | None = None,
    is_quiet: bool = False,
) -> int:
    """Write the missing images of a set; return their number.

    `actors` is the number of models, by default one per GPU, or one per machine without GPUs. `address` is that of a
    cluster; None starts Ray locally. ImportError without Ray. Errors of actors are raised here.
    """
    done = finished(recipe.folder, recipe.fingerprint)
    batches = batches_of(requested, batch)
    lacking = [i for i, some in enumerate(batches) if any(request.number not in done for request in some)]
    if not lacking:
        return 0
    job = f"ray-{uuid.uuid4().hex[:8]}"
    with cluster(address) as resources, images_bar(len(requested), len(done), is_quiet=is_quiet) as bar:
        from ray.data import ActorPoolStrategy, DataContext, from_items  # pyright: ignore[reportMissingImports]
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context, count = DataContext.get_current(), 0
        before, context.enable_progress_bars = context.enable_progress_bars, False
        size = actors or int(resources.get("GPU", 0)) or machines()
        share: Any = shares(resources, size)
        rows = from_items([{"number": i} for i in lacking], override_num_blocks=min(len(lacking), BLOCKS))
        results = rows.map_batches(
            Actor,
            fn_constructor_args=(recipe, batches, job, size * (1 + RETRIES)),
            batch_size=1,
            compute=ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
            **share,
        )
        try:
            for row in results.iter_rows():
                if row["failure"]:
                    raise received(row["failure"])
                count += int(row["made"])
                bar.update(int(row["made"]))
        except RayError as error:
            raise RuntimeError(f"the Ray job failed: {one_line(error)}") from error
        finally:
            context.enable_progress_bars = before
    return count


def shares(resources: Mapping[str, float], actors: int) -> dict[str, float]:
    """Return the resources per actor: a fraction of a CPU on small clusters, to leave some for Ray Data."""
    cpus = min(1.0, int(100 * SHARE * resources.get("CPU", 1.0) / actors) / 100)
    gpus = resources.get("GPU", 0.0)
    return {"num_cpus": max(cpus, 0.01)} | ({"num_gpus": min(1.0, gpus / actors)} if gpus else {})
