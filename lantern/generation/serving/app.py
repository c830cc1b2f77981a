"""The HTTP application: OpenAI's image generations and edits, models, health, and Prometheus metrics.

Metrics have the prefix `lantern:`, and vLLM's names where it has them; its `spec_decode_num_draft_tokens` is missing.
"""

import asyncio
import base64
import hmac
import io
import json
import logging
import math
import queue
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Form, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jaxtyping import UInt8
from PIL.Image import Image
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from lantern import __version__
from lantern.core.config import one_line
from lantern.core.sampling import MAX_GUIDANCE, MAX_TEMPERATURE, Sampling
from lantern.generation.choice import has_parts
from lantern.generation.images import QUALITY, Picture, Statistics, enlarge, save_options, to_image
from lantern.generation.init_image import KeptPart, edited, received
from lantern.generation.requests import (
    MAX_EXACT_SEED,
    MAX_PROMPT,
    as_requests,
    check_captions,
    check_prompt,
    check_requests,
    with_warnings,
)
from lantern.generation.requests import Request as ModelRequest
from lantern.generation.serving.worker import GRACE, RETRY, Job, RefusedError, Worker
from lantern.methods import find
from lantern.models.folder import Model, load_model

LOG = logging.getLogger(__name__)
PROBES = ("/health", "/ready", "/metrics")  # not logged
EDITS = "/v1/images/edits"
GONE = 499  # the status that nginx logs where a client has closed the connection
# what a job reports: "partial", "done" or "failed", the number of its image, what belongs to it, the partial's number
Event = tuple[str, int, Any, int | None]


@dataclass(frozen=True)
class Limits:
    """Limits of a server: characters of a prompt, seconds of a request, bytes of a body and seconds for its arrival.

    `upload` is `body` where images are sent. `batch` images are made at once, and at most `waiting` wait.
    `api_key` None is open; `origins` are those of web pages that may send requests, "*" for all.
    """

    prompt: int = 2000
    seconds: float = 600.0
    body: int = 64 << 10
    upload: int = 16 << 20
    arrival: float = 30.0
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    batch: int = 4
    waiting: int = 64


class ImageRequest(BaseModel):
    """Body of POST /v1/images/generations.

    The first group of fields is OpenAI's, the second this server's. `quality`, `style`, `moderation`, `user` and
    `safety_identifier` are accepted and have no effect. `seed` None is a random seed. A field that is not
    listed is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=10)] | None = 1
    size: str | None = "auto"
    quality: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = None
    style: str | None = None
    stream: bool | None = False
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = 0
    user: str | None = None
    safety_identifier: str | None = None

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    method: Annotated[str, Field(min_length=1)] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    guidance: Annotated[float, Field(ge=0, le=MAX_GUIDANCE)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=MAX_GUIDANCE)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class EditRequest(ImageRequest):
    """Fields of POST /v1/images/edits, as multipart/form-data: those of ImageRequest, and the files.

    OpenAI's clients name one image `image`, a list of them `image[]`. `input_fidelity` has no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    image: list[UploadFile] = []
    images: Annotated[list[UploadFile], Field(alias="image[]")] = []
    mask: list[UploadFile] = []
    input_fidelity: str | None = None


@contextmanager
def refused_for(param: str) -> Iterator[None]:
    """Turn a ValueError into the answer 400 that names a field, a RefusedError."""
    try:
        yield
    except ValueError as error:
        raise RefusedError(400, one_line(error), param=param) from None


class Call:
    """A request under way: its jobs, and the events that the model thread sends, in the order of arrival."""

    def __init__(self, service: "Service", body: ImageRequest, kept: KeptPart | None = None) -> None:
        self.service, self.body, self.kept = service, body, kept
        self.loop, self.events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self.created, self.begun = int(time.time()), time.monotonic()
        requested, sampling = service.requested(body)
        size, self.scale = service.size_of(body.size)
        self.form = body.output_format or "png"
        if self.form == "png" and body.output_compression not in (None, 100):
            message = "output_compression is for jpeg and webp, output_format is png"
            raise RefusedError(400, message, param="output_compression")
        # fields that answers and events share
        self.about = {"size": size, "quality": "auto", "background": "opaque", "output_format": self.form}
        partials = body.partial_images or 0
        if partials and not body.stream:
            raise RefusedError(400, "partial_images is for streams: give stream true", param="partial_images")
        self.jobs = [
            Job(one, body.method, sampling, partial(self._send, number), kept, partials)
            for number, one in enumerate(requested)
        ]
        service.worker.submit(self.jobs)
        late = RefusedError(504, "the request took longer than its time limit", code="timeout")
        self.timer = self.loop.call_later(service.limits.seconds, self.fail, late)

    def _send(self, number: int, kind: str, value: Any, index: int | None) -> None:
        with suppress(RuntimeError):  # the server has ended
            self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, number, value, index))

    def fail(self, error: RefusedError) -> None:
        """End the request with an error, and drop the images that are not complete."""
        self.events.put_nowait(("failed", 0, error, None))
        self.drop()

    def drop(self) -> None:
        """Cancel the images that are not complete."""
        for job in self.jobs:
            job.is_cancelled = True

    async def results(self) -> AsyncGenerator[Event, None]:
        """Yield the events until all images are done; RefusedError for an error. At the end the request is counted."""
        left, reason = len(self.jobs), "abort"
        try:
            while left:
                kind, _, value, _ = event = await self.events.get()
                if kind == "failed":
                    reason = "abort" if isinstance(value, RefusedError) and value.status == GONE else "error"
                    if isinstance(value, RefusedError):
                        raise value
                    LOG.error("an image failed", exc_info=value)
                    raise RefusedError(500, one_line(value), code="model_error")
                if kind == "done":
                    self.service.metrics.made(value.statistics)
                    left -= 1
                yield event
            reason = "stop"
        finally:
            self.timer.cancel()
            self.drop()
            metrics = self.service.metrics
            metrics.add("request_success", 1, reason)
            metrics.add("prompt_tokens", len(self.body.prompt.split()))
            metrics.see("e2e_request_latency_seconds", time.monotonic() - self.begun)

    def image(self, pixels: UInt8[Tensor, "h w 3"], picture: Picture | None = None) -> str:
        """The image in the requested size and format, in base64; with the settings of a finished one, but no prompt."""
        compression, target, facts = self.body.output_compression, io.BytesIO(), dict[str, Any]()
        if picture is not None:
            facts |= {"model": self.service.model.name, "sampling": asdict(self.jobs[0].sampling)}
            facts |= {"method": picture.statistics.method, "tokens_sha256": picture.tokens_sha256}
            facts |= {"seed": str(picture.request.seed), "image": str(picture.request.number)}
        options = save_options(self.form, facts, quality=QUALITY if compression is None else max(compression, 1))
        to_image(enlarge(pixels, self.scale)).save(target, **options)
        return base64.b64encode(target.getvalue()).decode()

    def usage(self, pictures: int) -> dict[str, Any]:
        """Tokens: words of the prompt and tokens kept of an image, tokens of the images."""
        words, tokens = len(self.body.prompt.split()), pictures * self.service.model.target.config.block_size
        kept = 0 if self.kept is None else int(self.kept.is_kept.sum())
        details = {"input_tokens_details": {"text_tokens": words, "image_tokens": kept}}
        given = words + kept
        return {"input_tokens": given, "output_tokens": tokens, "total_tokens": given + tokens, **details}


SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
Seconds = partial(Histogram, buckets=SECONDS)
METRICS: dict[str, tuple[Any, ...]] = {  # kind, text, labels
    "request_success": (Counter, "Finished requests.", "finished_reason"),
    "request_refused": (Counter, "Requests answered with an error.", "status"),
    "prompt_tokens": (Counter, "Words of prompts."),
    "generation_tokens": (Counter, "Generated tokens."),
    "iteration": (Counter, "Passes of the target, summed over images."),
    "spec_decode_num_accepted_tokens": (Counter, "Accepted drafted tokens."),
    "spec_decode_num_drafts": (Counter, "Steps that verified a draft."),
    "spec_decode_num_accepted_tokens_per_pos": (Counter, "Accepted drafted tokens by depth, from 0.", "position"),
    "relaxed_tokens": (Counter, "Tokens that only a relaxation accepted."),
    "total_variation_sum": (Counter, "Total variation, summed over tokens."),
    "e2e_request_latency_seconds": (Seconds, "Seconds from a request to its answer."),
    "request_queue_time_seconds": (Seconds, "Seconds that an image waited."),
    "request_decode_time_seconds": (Seconds, "Share of its batch's decoding of an image."),
    "num_requests_running": (Gauge, "Images that are being decoded."),
    "num_requests_waiting": (Gauge, "Images that wait in the queue."),
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, worker: Worker) -> None:
        self._name, self.registry = model_name, CollectorRegistry()
        self._metrics = {
            name: kind(f"lantern:{name}", text, ["model_name", *labels], registry=self.registry)
            for name, (kind, text, *labels) in METRICS.items()
        }
        self._metrics["num_requests_running"].labels(model_name).set_function(lambda: worker.running)
        self._metrics["num_requests_waiting"].labels(model_name).set_function(lambda: worker.queued)

    def made(self, statistics: Statistics) -> None:
        """Count a finished image."""
        self.add("generation_tokens", statistics.tokens)
        self.add("iteration", statistics.steps)
        self.add("spec_decode_num_accepted_tokens", sum(statistics.accepted))
        self.add("spec_decode_num_drafts", statistics.reached[0] if statistics.reached else 0)
        shares = {"relaxed_tokens": statistics.relaxed, "total_variation_sum": statistics.total_variation}
        for name, share in shares.items():  # of NaN, which stands for what was not measured, a sum would stay NaN
            self.add(name, 0.0 if math.isnan(share) else share * statistics.tokens)
        for depth, count in enumerate(statistics.accepted):
            self.add("spec_decode_num_accepted_tokens_per_pos", count, depth)
        self.see("request_decode_time_seconds", statistics.seconds.get("decode", 0.0))

    def add(self, name: str, amount: float, *labels: object) -> None:
        """Add to a counter."""
        self._metrics[name].labels(self._name, *labels).inc(amount)

    def see(self, name: str, seconds: float) -> None:
        """Add a value to a histogram."""
        self._metrics[name].labels(self._name).observe(seconds)


class Service:
    """What the routes share: the model, its worker, metrics and limits."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.model, self.limits, self.created = model, limits, int(time.time())
        self.worker = Worker(model, batch=limits.batch, waiting=limits.waiting)
        self.metrics = Metrics(model.name, self.worker)
        self.worker.observe = partial(self.metrics.see, "request_queue_time_seconds")

    def warm_up(self) -> None:
        """Make one image; its error is raised."""
        answers = queue.SimpleQueue[Any]()
        (one,) = as_requests(["a"])
        self.worker.submit([Job(one, None, self.model.sampling(), lambda kind, value, index: answers.put(value))])
        if isinstance(found := answers.get(), Exception):
            raise found

    def requested(self, body: ImageRequest) -> tuple[list[ModelRequest], Sampling]:
        """Return the images of a request and their sampling; RefusedError for what the model cannot make."""
        if body.model is not None:
            self.card(body.model)  # refuses other models
        if len(body.prompt) > self.limits.prompt:
            raise RefusedError(400, f"the prompt has more than {self.limits.prompt} characters", param="prompt")
        seed, sampling = secrets.randbelow(MAX_EXACT_SEED) if body.seed is None else body.seed, self.sampling_of(body)
        requested = as_requests([body.prompt] * (body.n or 1), seed)
        with refused_for("prompt"):
            check_requests(self.model, requested)
        with refused_for("method"):
            if ":" in (body.method or ""):  # with options a client could ask for any amount of memory
                raise ValueError(f"method is {body.method!r:.40}, wanted the name of a method without options")
            chosen = find(body.method or self.model.generation.get("method", "auto"))
            # what "auto" stands for is for the model thread to find: it alone runs passes
            if chosen.name != "auto" and not has_parts(self.model, chosen):
                raise ValueError(
                    f'method "{chosen.name}" needs trained parts that this model lacks: use another method, or train'
                    f" them (`lantern methods {chosen.name} --model FOLDER` has the commands)"
                )
        if body.negative_prompt:
            with refused_for("negative_prompt"):
                check_prompt(body.negative_prompt)
                check_captions(self.model, "negative_prompt", sampling)
                requested = [replace(one, negative_prompt=body.negative_prompt) for one in requested]
                check_requests(self.model, requested)
        return with_warnings(self.model, requested, warn=lambda line: None), sampling

    def card(self, name: str) -> dict[str, Any]:
        """Return the model as /v1/models describes it; RefusedError 404 for another name than that of this server."""
        if name != self.model.name:
            message = f"model {name[:80]!r} is not served here, {self.model.name!r} is"
            raise RefusedError(404, message, param="model", code="model_not_found")
        return {"id": name, "object": "model", "created": self.created, "owned_by": "lantern"}

    def sampling_of(self, body: ImageRequest) -> Sampling:
        """Return the model's distribution with the request's changes; RefusedError 400 names a value out of range."""
        if None not in (body.guidance, body.guidance_scale) and body.guidance != body.guidance_scale:
            raise RefusedError(400, "guidance and guidance_scale are one setting: give one of them", param="guidance")
        guidance = body.guidance if body.guidance is not None else body.guidance_scale
        with refused_for("temperature"):  # above 0 there is a least one
            return self.model.sampling(guidance=guidance, **body.model_dump(include={"temperature", "top_k", "top_p"}))

    def size_of(self, requested: str | None) -> tuple[str, int]:
        """Return the size in pixels as text, and how much images are enlarged; RefusedError 400 for another size."""
        height, width = self.model.size
        scales = [scale for scale in range(1, 17) if scale == 1 or max(width, height) * scale <= 2048]
        sizes = {f"{width * scale}x{height * scale}": scale for scale in scales}
        if requested is None or requested == "auto":
            return f"{width * self.model.scale}x{height * self.model.scale}", self.model.scale
        if requested not in sizes:
            message = f"size is {requested[:40]!r}, wanted auto or one of {', '.join(sizes)}"
            raise RefusedError(400, message, param="size")
        return requested, sizes[requested]


def start(model: str, limits: Limits, **how: Any) -> Service:
    """Load a model, start its thread, and make a first image; the error of that. `how` are arguments of `load_model`.

    ValueError for a model without pixels, or of classes.
    """
    loaded = load_model(model, **how)
    if not loaded.takes_prompts:
        raise ValueError(f"model {loaded.name} takes class labels, and requests have prompts: serve another")
    check_requests(loaded, as_requests(["a"]), with_pixels=True)
    service = Service(loaded, limits)
    service.worker.start()
    try:
        service.warm_up()
    except BaseException:  # a signal too: to exit while the thread computes would abort the process
        service.worker.give_up("the server stops")
        service.worker.stop(GRACE)
        raise
    return service


class Guard:
    """Logs requests under an id; refuses those without the API key (routes under /v1/), of other pages, and bad bodies.

    Those are bodies that are too long, too slow or of unknown length. HEAD is GET, whose body uvicorn leaves out.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._limits, self._metrics = app, service.limits, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request, name, begun = Request(scope), secrets.token_hex(8), time.monotonic()
        status, has_arrived = 500, False

        async def hear() -> Message:
            nonlocal has_arrived
            if has_arrived:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), begun + self._limits.arrival - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self._limits.arrival:g} seconds") from None
            except asyncio.CancelledError:
                raise HTTPException(503, "the server stops; send the request again", headers=RETRY) from None
            has_arrived = not message.get("more_body", False)
            return message

        async def say(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        error = self._fault(request)
        try:
            scope = dict(scope, method="GET" if request.method == "HEAD" else request.method)
            await (self._app if error is None else answer(error))(scope, hear, say)
        finally:
            path, seconds = request.scope["path"], time.monotonic() - begun
            if path not in PROBES:
                LOG.info("%s %.20s %.80r %d %.3f s", name, request.method, path, status, seconds)
            if status >= 400:
                self._metrics.add("request_refused", 1, status)

    def _fault(self, request: Request) -> RefusedError | None:
        limits, headers = self._limits, request.headers
        if limits.api_key is not None and request.scope["path"].startswith("/v1/"):
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {limits.api_key}".encode()):
                return RefusedError(401, "the API key is missing or wrong", code="invalid_api_key")
        if request.method == "POST":
            if (page := headers.get("origin")) is not None and not {page, "*"} & {*limits.origins}:
                return RefusedError(403, f"pages of {page!r:.80} may not send requests: allow them by --allow-origin")
            length = headers.get("content-length", "")
            if not length.isdecimal() or "transfer-encoding" in headers:  # which h11 reads the body by
                return RefusedError(411, "the body has no Content-Length")
            most = limits.upload if request.scope["path"] == EDITS else limits.body
            if int(length) > most:
                return RefusedError(413, f"the body has {length[:20]} bytes, at most {most} are accepted")
        return None


def build_app(service: Service) -> FastAPI:
    """Return the application; its model thread must have been started."""
    # the pages that FastAPI makes of the schema load scripts from other hosts
    app = FastAPI(title="lantern", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)

    async def refuse(request: Request, error: Exception) -> Response:
        return answer(refusal(request, error))

    for kind in (RefusedError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Guard, service=service)
    if service.limits.origins:  # before the guard: a preflight has no key
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        allowed["expose_headers"] = ["x-request-id", "Retry-After"]
        app.add_middleware(CORSMiddleware, allow_origins=service.limits.origins, **allowed)

    @app.get("/ready")
    @app.get("/health")
    async def health() -> Response:
        """200 while the model thread runs and its steps end."""
        return Response(status_code=200 if service.worker.is_well(service.limits.seconds) else 503)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """The version of lantern."""
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [service.card(service.model.name)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name; 404 for others."""
        return service.card(name)

    async def made(body: ImageRequest, request: Request, kept: KeptPart | None = None) -> Response:
        call = Call(service, body, kept)
        if body.stream:
            return StreamingResponse(streamed(call), media_type="text/event-stream")
        return await whole(call, request)

    reading = asyncio.Lock()  # one file at a time: others wait, answers do not

    def read(file: UploadFile, name: str) -> Image:
        with refused_for(name):
            return received(service.model, file.file.read(), name)

    @app.post("/v1/images/generations")
    async def generations(body: ImageRequest, request: Request) -> Response:
        """Make images of a prompt."""
        return await made(body, request)

    @app.post(EDITS)
    async def edits(body: Annotated[EditRequest, Form()], request: Request) -> Response:
        """Make images of a prompt that keep a part of an image: what is opaque in the mask, or in the image itself."""
        files, masks = [*body.image, *body.images], body.mask
        if len(files) != 1 or len(masks) > 1:
            got = f"{len(files)} images and {len(masks)} masks"
            raise RefusedError(400, f"got {got}, wanted one image and at most one mask", param="image")
        async with reading:
            images = {"image": await asyncio.to_thread(read, files[0], "image")}
            if masks:
                images["mask"] = await asyncio.to_thread(read, masks[0], "mask")
        with refused_for("mask"):
            kept = edited(service.model, **images)
        return await made(body, request, kept)

    return app


def answer(error: RefusedError) -> JSONResponse:
    """Return the answer that has an error."""
    return JSONResponse(error.body, error.status, error.headers)


def refusal(request: Request, error: Exception) -> RefusedError:
    """Return what a request is answered with after an error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid_body(request, error.errors()[0])
    if not isinstance(error, HTTPException):
        return RefusedError(500, one_line(error))
    message, headers = str(error.detail), error.headers or {}
    if error.status_code == 404:
        message = f"there is no {request.scope['path'][:80]} here; images are made by POST /v1/images/generations"
    elif error.status_code == 405:
        message = f"{request.method[:20]} is not accepted here, wanted {headers.get('Allow', 'another')}"
    return RefusedError(error.status_code, message, headers=headers)


def invalid_body(request: Request, fault: dict[str, Any]) -> RefusedError:
    """Return the answer to a body that pydantic finds a fault in."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if request.scope["path"] == EDITS and kind != "multipart/form-data":
        return RefusedError(415, f"the Content-Type is {kind[:80] or 'missing'}, wanted multipart/form-data")
    path = ".".join(part for part in fault["loc"] if isinstance(part, str) and part != "body")
    if fault["type"] == "json_invalid":
        return RefusedError(400, f"the body is no JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}")
    if path:  # a form's empty fields count as missing, and only files have a check of their own
        plain = {"missing": "it is missing or empty", "value_error": "wanted a file"}
        return RefusedError(400, f"{path}: {plain.get(fault['type'], fault['msg'])}", param=path)
    if fault["type"] == "missing":
        return RefusedError(400, "the body is empty, wanted a JSON object with the field prompt")
    if kind != "application/json" and not kind.endswith("+json"):
        return RefusedError(415, f"the Content-Type is {kind[:80] or 'missing'}, wanted application/json")
    return RefusedError(400, "the body is no JSON object, wanted one with the field prompt")


async def whole(call: Call, request: Request) -> Response:
    """Wait for all images, and answer; a client that goes away cancels its images."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        call.fail(RefusedError(GONE, "the client has gone away"))

    leaving = asyncio.create_task(leave())
    try:
        made = {number: value async for kind, number, value, _ in call.results() if kind == "done"}
    finally:
        leaving.cancel()
    pictures = [made[number] for number in sorted(made)]
    found = {
        "created": call.created,
        "data": [{"b64_json": await asyncio.to_thread(call.image, picture.pixels, picture)} for picture in pictures],
        **call.about,
        "usage": call.usage(len(pictures)),
        "metrics": [metrics_of(picture) for picture in pictures],
        **warnings_of(pictures[0]),
    }
    return JSONResponse(found)


async def streamed(call: Call) -> AsyncIterator[bytes]:
    """Yield the server-sent events of the images: partial images, then each finished one, or an error.

    `image_index` is the number of the image, from 0; the events of several images alternate.
    """
    try:
        async with aclosing(call.results()) as results:
            async for kind, number, value, index in results:
                given = (value,) if kind == "partial" else (value.pixels, value)
                fields = {"b64_json": await asyncio.to_thread(call.image, *given), "created_at": call.created}
                fields |= call.about | {"image_index": number}
                if kind == "partial":
                    name, more = "partial_image", {"partial_image_index": index}
                else:
                    name, more = "completed", {"usage": call.usage(1), "metrics": metrics_of(value)}
                    more |= warnings_of(value)
                yield sse(f"image_{'generation' if call.kept is None else 'edit'}.{name}", fields | more)
    except RefusedError as error:
        yield sse("error", error.body)


def metrics_of(picture: Picture) -> dict[str, Any]:
    """Return the statistics of an image, and its seed."""
    return picture.statistics.as_dict() | {"seed": picture.request.seed}


def warnings_of(picture: Picture) -> dict[str, list[str]]:
    """Return the field of warnings about an image's prompts, {} without any."""
    return {"warnings": [picture.request.warning]} if picture.request.warning else {}


def sse(name: str, fields: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()
