"""The thread that owns the model: a bounded queue of images, and rows in which images are decoded together."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.decoding.rounds import Joint
from lantern.engines.prepared import WeightCache
from lantern.generation.generator import (
    BatchSize,
    Generator,
    choose_method,
    finish_batch,
    has_parts,
    is_out_of_memory,
)
from lantern.generation.progress import Canvas, partial_pixels
from lantern.generation.requests import Request
from lantern.models.folder import Model
from lantern.models.llamagen.text import TextEncoder

KEPT = 8  # assembled decoders that no picture uses
CAPTIONS = 64  # prompts whose embeddings are kept
PATIENCE = 0.01  # seconds of steps between looks at the queue


class QueueFullError(Exception):
    """More images wait than the queue holds."""


@dataclass(eq=False)
class Job:
    """One image of a request.

    `send` is called from the model thread: with ("partial", pixels, index), then ("done", image, None) or ("failed",
    exception, None). `is_cancelled` is set by the other side; such an image is not started, or
    leaves its row; a wave of which no image is wanted any more ends.
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
        """What images of one wave have in common."""
        return self.method, self.sampling


class Worker(threading.Thread):
    """Decodes queued images, at most `batch` at a time, in the order of arrival.

    An image joins those under way as soon as a row is free, whatever its method and sampling, and leaves its row when
    its codes are complete, when it is cancelled or when its time is up (`decoding.rounds.Joint`). Noise is that of
    (seed, number), so an image does not depend on what else is decoded, as far as the engine keeps that
    (`Statistics.promise`). `observe` receives the waits in seconds of images that start.
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
        self._idle: list[tuple[Any, Generator]] = []  # the latest last
        self._rows: list[Row] = []
        self._joint, self._is_stopping = self._no_rounds(), False
        self._captions = Captions()

    @property
    def queued(self) -> int:
        """Pictures that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Pictures that are being decoded."""
        return len(self._rows)

    def check(self, method: str | None, sampling: Sampling) -> None:
        """Raise ValueError for a method that the model cannot decode with, or for which it lacks a trained part."""
        chosen = choose_method(self.model, method, sampling=sampling)
        if not has_parts(self.model, chosen):
            raise ValueError(
                f'method "{chosen.name}" needs trained parts that this model lacks: use another method, or train them'
                f" (`lantern methods {chosen.name}` has the commands)"
            )

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none; QueueFullError if there is no room or the worker stops."""
        with self._changed:
            if self._is_stopping or len(self._queue) + len(jobs) > self.waiting:
                raise QueueFullError
            self._queue.extend(jobs)
            self._changed.notify()

    def stop(self, seconds: float) -> bool:
        """Take no more images, finish those that are queued within `seconds`, and end; whether all were finished."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.join(seconds)
        return not self.is_alive()

    def run(self) -> None:
        """Decode until stopped and the queue is empty."""
        while self._wait():
            self.step()

    def step(self) -> None:
        """Free the rows of images that are not wanted any more, start waiting ones, and take a step of each."""
        self._rows = [row for row in self._rows if self._is_wanted(row.job)]
        self._admit()
        try:
            self._step()
        except Exception as error:  # any fault of one batch must not end the server
            self._give_up(error)

    def _wait(self) -> bool:
        """Return True once there is something to do, False to end."""
        with self._changed:
            while not self._queue and not self._rows:
                if self._is_stopping:
                    return False
                self._joint = self._no_rounds()  # frees its memory
                self._changed.wait()
        return True

    def _is_wanted(self, job: Job) -> bool:
        """Return whether an image is still wanted; its time-out is reported."""
        if job.deadline is not None and time.monotonic() > job.deadline:
            job.send("failed", TimeoutError("the request took longer than its time limit"), None)
            return False
        return not job.is_cancelled

    def _admit(self) -> None:
        """Start images while rows are free; one that needs a wave waits until all rows are."""
        while len(self._rows) < self.batch and self._queue:
            job = self._queue[0]
            if not self._is_wanted(job):
                self._take(job)
                continue
            try:
                generator = self._decoder(job)
                waited = time.monotonic() - job.queued
                self._rows.append(Row(job, generator, self._captions))
                self._take(job)
                self.observe([waited])
            except Exception as error:
                if is_out_of_memory(error) and self._rows:
                    self.batch = len(self._rows)
                    return
                self._take(job)
                job.send("failed", error, None)

    def _keep(self, job: Job, generator: Generator) -> None:
        """Keep a decoder that no image uses any more."""
        self._idle = [*self._idle, (job.kind, generator)][-max(KEPT, self.batch) :]

    def _take(self, job: Job) -> None:
        with self._changed:
            self._queue.remove(job)

    def _step(self) -> None:
        """Take a step of each image, and send those that are complete."""
        if not self._rows:
            return
        begun = time.perf_counter()
        patience = 0.0 if any(row.job.partials for row in self._rows) else PATIENCE
        self._joint.take([row.state for row in self._rows], patience)
        share = (time.perf_counter() - begun) / len(self._rows)
        for row in self._rows:
            row.seconds["decode"] += share
            if row.job.partials:
                row.watch(row.state.step)
        done = [row for row in self._rows if row.state.is_done()]
        self._rows = [row for row in self._rows if row not in done]
        for row in done:
            row.send_picture(self.batch)
            self._keep(row.job, row.generator)

    def _give_up(self, error: Exception) -> None:
        """End all images under way with an error; where memory ran out, start fewer of them again."""
        lost, self._rows, self._joint, self._idle = self._rows, [], self._no_rounds(), []
        if is_out_of_memory(error) and len(lost) > 1:
            self.batch = len(lost) // 2
            with self._changed:
                self._queue.extendleft(row.job for row in reversed(lost))
        else:
            for row in lost:
                row.job.send("failed", error, None)

    def _no_rounds(self) -> Joint:
        """Return what takes rounds, of no generation yet."""
        engine = self.model.engine
        return Joint(engine.group, engine.drive)

    def _decoder(self, job: Job) -> Generator:
        """Return a decoder for an image that no other image uses, kept from an earlier one if there was one."""
        for place, (kind, generator) in reversed(list(enumerate(self._idle))):
            if kind == job.kind:
                del self._idle[place]
                return generator
        method = choose_method(self.model, job.method, sampling=job.sampling)
        size = BatchSize(self.batch, lambda tried, fits: setattr(self, "batch", min(self.batch, fits)))
        return Generator(self.model, method, job.sampling, size=size)


class Row:
    """An image that is being decoded, with the decoder that it uses alone."""

    def __init__(self, job: Job, generator: Generator, captions: "Captions") -> None:
        self.job, self.generator, begun = job, generator, time.perf_counter()
        self.watch = Watch(generator, [job])
        self.state = generator.begin(captions.added(generator, job.request))
        self.watch(self.state.step)
        self.seconds = {"prompt": time.perf_counter() - begun, "decode": 0.0}

    def send_picture(self, together: int) -> None:
        """Decode the codes to pixels and send the image; `together` is the largest number decoded together."""
        generation = self.state.result()
        how: dict[str, Any] = {"seconds": self.seconds, "with_pixels": True, "images": together}
        try:
            (picture,) = finish_batch(self.generator, [self.job.request], generation, **how)
        except Exception as error:
            self.job.send("failed", error, None)
        else:
            self.job.send("done", picture, None)


class Captions:
    """Conditions of the latest prompts, so that the images of a prompt need one pass of the text encoder.

    They are dropped when the text encoder's weights change.
    """

    def __init__(self) -> None:
        self._latest: WeightCache[OrderedDict[str, Condition]] = WeightCache(lambda _: OrderedDict())

    def added(self, generator: Generator, request: Request) -> Request:
        """Return the request with the condition of its prompt; others, and those of token prompts, as they are."""
        encoder, text = generator.model.text, request.text
        if text is None or request.condition is not None or not isinstance(encoder, TextEncoder):
            return request
        known = self._latest.get(encoder.model)
        if text not in known:
            known[text] = generator.condition([request])
        known.move_to_end(text)
        if len(known) > CAPTIONS:
            known.popitem(last=False)
        return replace(request, condition=known[text])


class Watch:
    """Callback of images that are decoded: sends partial images.

    `done` is the number of finished images, where little memory splits a wave.
    """

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self._generator, self._jobs = generator, jobs
        self._codes = generator.model.target.config.block_size
        self._canvas, self._sent = Canvas(self._codes), [0] * len(jobs)
        self._has_partials, self.done = any(job.partials for job in jobs), 0

    def __call__(self, step: Step) -> None:
        """Look at one pass."""
        if not self._has_partials:
            return
        self._canvas.add(step)
        for i, known in enumerate(self._canvas.known.tolist()):  # sync
            job, number = self._jobs[self.done + i], self.done + i
            due = min(known * (job.partials + 1) // self._codes, job.partials)
            if self._sent[number] < due:
                self._sent[number] = due
                job.send("partial", partial_pixels(self._generator, self._canvas.codes[i]), due - 1)
