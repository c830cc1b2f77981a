"""The thread that owns the model: a bounded queue of images, and rows in which images are decoded together.

Importing this module imports no web framework.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from lantern.core.config import is_out_of_memory, one_line
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.core.weights import WeightCache, on_device
from lantern.decoding.rounds import Joint
from lantern.decoding.statistics import now
from lantern.generation.choice import choose_method
from lantern.generation.generator import Generator, finish_batch, release_memory
from lantern.generation.images import Picture
from lantern.generation.init_image import KeptPart
from lantern.generation.requests import Request, captions
from lantern.models.folder import Model
from lantern.models.llamagen.text import TextEncoder

LOG = logging.getLogger(__name__)
KEPT = 8  # assembled decoders that no image uses
CAPTIONS = 64  # prompts whose embeddings are kept
RETRY = {"Retry-After": "2"}  # seconds after which trying again can help
GRACE = 5  # seconds to end the requests that were given up
PATIENCE = 0.01  # seconds of steps between looks at the queue


class RefusedError(Exception):
    """A request that is answered with an error in OpenAI's form; `status` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(eq=False)
class Job:
    """One image of a request.

    `send` is called with ("partial", pixels, index), then ("done", image, None) or ("failed", exception, None), as a
    rule from the model thread. An image that is cancelled, by the other side, is not started, or leaves its row.
    """

    request: Request
    method: str | None
    sampling: Sampling
    send: Callable[[str, Any, int | None], None]
    kept: KeptPart | None = None  # of another image
    partials: int = 0
    is_cancelled: bool = False
    queued: float = field(default_factory=time.monotonic)


class Worker(threading.Thread):
    """Decodes queued images, at most `batch` at a time, in the order of arrival.

    An image joins those under way as soon as a row is free, whatever its method and sampling, and leaves its row when
    its tokens are complete or when it is cancelled (`decoding.rounds.Joint`). Noise is that of (seed, number), so an
    image does not depend on what else is decoded, as far as the engine keeps that (`Statistics.promise`). `observe`
    receives the seconds that each image waited.
    """

    def __init__(self, model: Model, *, batch: int = 4, waiting: int = 64) -> None:
        super().__init__(name="lantern-model", daemon=True)
        self.model, self.batch, self.waiting = model, batch, waiting
        self.observe: Callable[[float], None] = lambda wait: None
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        # by method and sampling, the latest last
        self._idle = deque[tuple[tuple[str | None, Sampling], Generator]](maxlen=max(KEPT, batch))
        self._rows: list[Row] = []
        self._no_rounds = partial(Joint, model.engine.group, model.engine.drive)
        self._joint = self._no_rounds()
        self._reason = ""  # why no more images are taken
        self._stepped = time.monotonic()
        self.fault: Exception | None = None
        # by the encoder's weights: the conditions of the latest prompts
        self._captions = WeightCache(lambda _: lru_cache(CAPTIONS)(lambda text: captions(self.model, [text])))

    @property
    def queued(self) -> int:
        """Images that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Images that are being decoded."""
        return len(self._rows)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none; RefusedError if there is no room or the worker stops."""
        with self._changed:
            if self._reason:
                raise self._stopped()
            if len(jobs) > self.waiting:
                raise RefusedError(400, f"n is {len(jobs)}, wanted at most {self.waiting}, the queue", param="n")
            self._queue = deque(job for job in self._queue if not job.is_cancelled)
            if len(self._queue) + len(jobs) > self.waiting:
                raise RefusedError(429, "the queue is full", code="queue_full", headers=RETRY)
            self._queue.extend(jobs)
            self._changed.notify()

    def stop(self, seconds: float) -> bool:
        """Take no more images, finish those that are queued within `seconds`, and end; whether all were finished."""
        with self._changed:
            self._reason = self._reason or "the server stops"
            self._changed.notify()
        self.join(seconds)
        return not self.is_alive()

    def give_up(self, reason: str) -> None:
        """Take no more images, and end those under way and those that wait with an answer; from any thread."""
        with self._changed:
            self._reason = reason
            lost = [*(row.job for row in self._rows), *self._queue]
            self._queue.clear()
            self._changed.notify()
        for job in lost:
            job.is_cancelled = True
            job.send("failed", self._stopped(), None)

    def _stopped(self) -> RefusedError:
        return RefusedError(503, f"{self._reason}; send the request again", code="server_stopped", headers=RETRY)

    def is_well(self, seconds: float) -> bool:
        """Return whether the thread runs, and no step under way has taken `seconds`."""
        return self.is_alive() and not (self._rows and time.monotonic() - self._stepped > seconds)

    def run(self) -> None:
        """Decode until stopped and the queue is empty. An error that ends the thread becomes `fault`."""
        try:
            with on_device(self.model.device):  # a thread begins with the first GPU
                while self._wait():
                    self.step()
        except Exception as error:  # every image gets an answer, whatever happened
            self.fault = error
            LOG.critical("the model thread has ended", exc_info=error)
            self.give_up(f"the model thread has ended: {one_line(error)}")

    def step(self) -> None:
        """Free the rows of images that are not wanted any more, start waiting ones, and take a step of each."""
        self._rows, self._stepped = [row for row in self._rows if not row.job.is_cancelled], time.monotonic()
        self._admit()
        if not self._rows:
            return
        begun = time.perf_counter()
        try:
            patience = 0.0 if any(row.job.partials for row in self._rows) else PATIENCE
            self._joint.take([row.state for row in self._rows], patience)
            share = (time.perf_counter() - begun) / len(self._rows)
            for row in self._rows:
                row.seconds["decode"] += share
                row.send_partial()
        except Exception as error:  # any other fault of a step must not end the server
            if is_final(error):
                raise
            return self._lose(error)
        for row in [row for row in self._rows if row.state.is_done()]:
            try:
                row.job.send("done", row.picture(self.batch), None)
            except Exception as error:
                self._fail(row.job, error)
            self._rows.remove(row)
            self._idle.append(((row.job.method, row.job.sampling), row.generator))

    def _wait(self) -> bool:
        """Return True once there is something to do, False to end."""
        with self._changed:
            while not self._queue and not self._rows:
                if self._reason:
                    return False
                self._joint = self._no_rounds()  # frees its memory
                self._changed.wait()
        return True

    def _admit(self) -> None:
        """Start images while rows are free; where memory runs out, first without idle ones, then fewer."""
        is_released = False
        while len(self._rows) < self.batch and (job := next(iter(list(self._queue)), None)) is not None:
            if self._start(job, is_last=is_released and not self._rows):
                with self._changed, suppress(ValueError):  # it was given up
                    self._queue.remove(job)
            elif not is_released:
                self._idle.clear()
                release_memory()
                is_released = True
            else:
                self.batch = len(self._rows)
                return

    def _start(self, job: Job, *, is_last: bool) -> bool:
        """Start an image, or end it with an error; False where memory ran out, but for the last try."""
        try:
            if not job.is_cancelled:
                waited = time.monotonic() - job.queued
                self._rows.append(Row(job, self._decoder(job), self._read(job)))
                self.observe(waited)
        except Exception as error:
            if is_out_of_memory(error) and not is_last:
                return False
            self._fail(job, error)
        return True

    def _fail(self, job: Job, error: Exception) -> None:
        """End an image with an error; an error that is final is raised again."""
        if is_final(error):
            raise error
        job.send("failed", error, None)

    def _lose(self, error: Exception) -> None:
        """End all images under way with an error; where memory ran out, start fewer of them again."""
        lost, self._rows, self._joint = self._rows, [], self._no_rounds()
        self._idle.clear()
        if is_out_of_memory(error) and len(lost) > 1:
            self.batch = len(lost) // 2
            with self._changed:
                self._queue.extendleft(row.job for row in reversed(lost))
        else:
            for row in lost:
                row.job.send("failed", error, None)

    def _read(self, job: Job) -> Request:
        """Return the request of an image with what it keeps of another, and with the condition of its prompts.

        The conditions of the latest prompts are kept while the encoder's weights are the same, so that those of a
        prompt need one pass of the encoder. Token prompts are read by the target.
        """
        encoder, request = self.model.text, job.request
        if job.kept is not None:
            request = replace(request, forced=job.kept.tokens)
        if request.text is None or not isinstance(encoder, TextEncoder):
            return request
        caption = self._captions.get(encoder.model)
        negative: Condition | None = caption(request.negative_prompt) if request.negative_prompt else None
        return replace(request, condition=caption(request.text), negative=negative)

    def _decoder(self, job: Job) -> Generator:
        """Return a decoder for an image that no other image uses, kept from an earlier one if there was one.

        One whose rounds are captured serves all samplings of one form.
        RefusedError for a requested method that the model's sizes, its parts or the engine do not allow.
        """
        for idle in reversed(self._idle):
            if idle[0] == (job.method, job.sampling):
                self._idle.remove(idle)
                return idle[1]
        method = choose_method(self.model, job.method, sampling=job.sampling)
        for idle in reversed(self._idle):
            of, form = idle[1], idle[1].sampling.form
            if of.parts.engine.captures and of.method == method and form == job.sampling.form:
                self._idle.remove(idle)
                return Generator(self.model, method, job.sampling, parts=of.parts)
        try:
            return Generator(self.model, method, job.sampling)
        except ValueError as error:
            if job.method is None:
                raise
            raise RefusedError(400, one_line(error), param="method") from None


def is_final(error: Exception) -> bool:
    """Return whether the device answers nothing more after an error, such as an illegal access of a CUDA kernel."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


class Row:
    """An image that is being decoded, with the decoder that it uses alone; RefusedError for a prompt it cannot read."""

    def __init__(self, job: Job, generator: Generator, request: Request) -> None:
        self.job, self.generator, self.request, begun = job, generator, request, time.perf_counter()
        self._tokens, self._due, self._sent = generator.model.target.config.block_size, 0, 0
        try:
            self.state = generator.begin(request)
        except ValueError as error:  # as of a prompt with the token of a given image
            raise RefusedError(400, one_line(error), param="prompt") from None
        self.send_partial()
        self.seconds = {"prompt": time.perf_counter() - begun, "decode": 0.0}

    def send_partial(self) -> None:
        """Send a partial image if one is due."""
        if not self.job.partials:
            return
        known = int(self.state.known[0])  # sync
        due = min(known * (self.job.partials + 1) // self.state.end, self.job.partials)
        if self._due < due:
            tokens = self.state.tokens[0, : self._tokens]
            self.job.send("partial", self.generator.partial_pixels(tokens, known), self._sent)
            self._due, self._sent = due, self._sent + 1

    def picture(self, together: int) -> Picture:
        """Decode the tokens to pixels; `together` is the largest number of images decoded together."""
        begun = time.perf_counter()
        now(self.generator.model.device)  # steps that the device has not finished
        self.seconds["decode"] += time.perf_counter() - begun
        how: dict[str, Any] = {"seconds": self.seconds, "with_pixels": True, "images": together}
        made = finish_batch(self.generator, [self.request], self.state.result(), **how)[0]
        if together > 1 and self.state.kind is not None and made.statistics.promise == "tokens":
            # products may round otherwise in each size of batch that it was in
            return replace(made, statistics=replace(made.statistics, promise="distribution"))
        return made
