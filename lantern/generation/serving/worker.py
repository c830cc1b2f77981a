"""The thread that owns the model: a bounded queue of pictures, and batches of those that decode alike."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.generation.generator import BatchSize, Generator, choose_method, make_batches
from lantern.generation.images import NotFiniteError, Picture
from lantern.generation.progress import Canvas
from lantern.generation.requests import Request
from lantern.models.folder import Model

KEPT = 8  # assembled decoders, one for each method and sampling in use


class QueueFullError(Exception):
    """More pictures wait than the queue holds."""


@dataclass(eq=False)
class Job:
    """One picture of a request.

    `send` is called from the model thread: with ("partial", pixels, index), then ("done", picture, None) or ("failed",
    exception, None). `is_cancelled` is set by the other side; such a picture is not started, and a batch of which no
    picture is wanted any more is given up.
    """

    request: Request
    method: str | None
    sampling: Sampling
    send: Callable[[str, Any, int | None], None]
    partials: int = 0
    deadline: float | None = None
    is_cancelled: bool = False
    queued: float = field(default_factory=time.monotonic)

    @property
    def kind(self) -> tuple[str | None, Sampling]:
        """What pictures of one batch have in common."""
        return self.method, self.sampling


class AbandonedError(Exception):
    """Ends a batch whose pictures are all cancelled."""


class Worker(threading.Thread):
    """Decodes queued pictures in batches of at most `batch`, in the order of arrival.

    A batch holds pictures of one method and one sampling; noise is that of (seed, number), so a picture does not depend
    on what else is in its batch, as far as the engine keeps that (`Statistics.promise`). `observe` receives the wait in
    seconds of each started picture and the size of each batch.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch: int = 4,
        waiting: int = 64,
        observe: Callable[[Sequence[float]], None] = lambda waits: None,
    ) -> None:
        super().__init__(name="lantern-model", daemon=True)
        self.model, self.batch, self.waiting, self.observe = model, batch, waiting, observe
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._decoders: OrderedDict[Any, Generator] = OrderedDict()
        self._is_stopping, self.running = False, 0

    @property
    def queued(self) -> int:
        """Pictures that wait."""
        return len(self._queue)

    def check(self, method: str | None, sampling: Sampling) -> None:
        """Raise ValueError for a method that the model cannot decode with."""
        choose_method(self.model, method, sampling=sampling)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the pictures of a request, all or none; QueueFullError if there is no room or the worker stops."""
        with self._changed:
            if self._is_stopping or len(self._queue) + len(jobs) > self.waiting:
                raise QueueFullError
            self._queue.extend(jobs)
            self._changed.notify()

    def stop(self, seconds: float) -> bool:
        """Take no more pictures, finish those that are queued within `seconds`, and end; whether all were finished."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.join(seconds)
        return not self.is_alive()

    def run(self) -> None:
        """Decode until stopped and the queue is empty."""
        while (jobs := self._next()) is not None:
            if jobs:
                self.observe([time.monotonic() - job.queued for job in jobs])
                self.running = len(jobs)
                try:
                    self._decode(jobs)
                except Exception as error:  # any fault of one batch must not end the server
                    for job in jobs:
                        job.send("failed", error, None)
                finally:
                    self.running = 0

    def _next(self) -> list[Job] | None:
        """Wait for pictures and return those of the next batch, without cancelled and expired ones."""
        with self._changed:
            while not self._queue:
                if self._is_stopping:
                    return None
                self._changed.wait()
            kind, taken, left = self._queue[0].kind, list[Job](), deque[Job]()
            for job in self._queue:
                if job.kind == kind and len(taken) < self.batch:
                    taken.append(job)
                else:
                    left.append(job)
            self._queue = left
        ready = []
        for job in taken:
            if job.deadline is not None and time.monotonic() > job.deadline:
                job.send("failed", TimeoutError("the request waited longer than its time limit"), None)
            elif not job.is_cancelled:
                ready.append(job)
        return ready

    def _decode(self, jobs: list[Job]) -> None:
        generator = self._decoder(jobs[0])
        watch = Watch(generator, jobs)
        try:
            for pictures in make_batches(generator, [job.request for job in jobs], with_pixels=True, callback=watch):
                for job, picture in zip(jobs[watch.done :], pictures, strict=False):
                    job.send("done", picture, None)
                watch.done += len(pictures)
        except AbandonedError:
            pass
        except NotFiniteError as error:
            sound = {id(picture.request): picture for picture in error.sound}
            for job in jobs[watch.done :]:
                found: Picture | None = sound.get(id(job.request))
                job.send(*(("failed", error, None) if found is None else ("done", found, None)))

    def _decoder(self, job: Job) -> Generator:
        """Return the decoder of a kind of picture, kept from an earlier batch if there was one."""
        if job.kind not in self._decoders:
            method = choose_method(self.model, job.method, sampling=job.sampling)
            size = BatchSize(self.batch, lambda tried, fits: setattr(self, "batch", min(self.batch, fits)))
            self._decoders[job.kind] = Generator(self.model, method, job.sampling, size=size)
        self._decoders.move_to_end(job.kind)
        while len(self._decoders) > KEPT:
            self._decoders.popitem(last=False)
        return self._decoders[job.kind]


class Watch:
    """Callback of a batch: sends partial pictures, and ends a batch that is not wanted any more.

    `done` is the number of finished pictures, where little memory splits the batch.
    """

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self._generator, self._jobs = generator, jobs
        self._codes = generator.model.target.config.block_size
        self._canvas, self._sent = Canvas(self._codes), [0] * len(jobs)
        self._has_partials, self.done = any(job.partials for job in jobs), 0

    def __call__(self, step: Step) -> None:
        """Look at one pass."""
        if all(job.is_cancelled for job in self._jobs):
            raise AbandonedError
        if not self._has_partials:
            return
        self._canvas.add(step)
        for i, known in enumerate(self._canvas.known.tolist()):  # sync
            job, number = self._jobs[self.done + i], self.done + i
            due = min(known * (job.partials + 1) // self._codes, job.partials)
            if self._sent[number] < due:
                self._sent[number] = due
                job.send("partial", partial_pixels(self._generator, self._canvas.codes[i]), due - 1)


def partial_pixels(generator: Generator, codes: Int[Tensor, " n"]) -> UInt8[Tensor, "h w 3"]:
    """Return the picture of a grid in which some codes are still -1: the rows below the last known code are grey."""
    raster = generator.model.target.config.raster
    known = int((codes >= 0).sum())
    last = codes[max(known - 1, 0)].clamp(min=0)
    pixels = generator.pixels(torch.where(codes >= 0, codes, last)[None])[0].clone()
    rows = -(-known // raster.columns) * (pixels.shape[0] // raster.rows)
    pixels[rows:] = 128
    return pixels
