"""The page of `lantern demo`: plain decoding and a method fill their images side by side.

The method decodes first, plain decoding after it, so that neither slows the other. While plain decoding runs, the page
shows its rows as they are completed, and beside them the rows that the method had after the same seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from html import escape
from itertools import pairwise
from math import isnan
from typing import Any, NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.loop import kept
from lantern.generation.acceptance_map import AcceptanceMap, data_uri, draw_map, legend, read_map
from lantern.generation.comparison import Comparison, warm_up
from lantern.generation.generator import Generator, choose_method, has_parts, make_batch
from lantern.generation.images import Picture, to_image
from lantern.generation.progress import partial_pixels
from lantern.generation.requests import MAX_SEED, Request, check_requests, with_warnings
from lantern.methods import METHODS, Method
from lantern.methods.method import Promise
from lantern.models.folder import Model

GROUPS: dict[Promise, str] = {"tokens": "same image", "distribution": "same distribution", "relaxed": "relaxed"}
KEPT = 24  # pictures of the gallery
LEAST = 1.2  # chosen, not measured: tokens per step below which a default that nothing recommends goes on plainly
CSS = """
.side img, .side svg { width: 100%; max-width: 28rem; display: block; background: #808080; }
#numbers td, #numbers th { white-space: nowrap; }
.legend { list-style: none; padding: 0; font-size: .9rem; }
.swatch { display: inline-block; width: 1em; height: 1em; margin-right: .5em; border: 1px solid #888; }
.swatch.round { border-radius: 50%; }
"""


PATIENCE = 30.0  # seconds that a decoding waits for the page to show a row


class StoppedError(Exception):
    """Ends a decoding whose page was closed."""


class Mark(NamedTuple):
    """How far an image was after some seconds."""

    seconds: float
    known: int
    steps: int


class Track:
    """Callback of one image: what was decoded after which seconds.

    `marks` holds (seconds since the first token, known tokens, passes) of each pass, without the seconds that callbacks
    took; these are `spent`. `look` is called with the track after each pass that completes a row.
    """

    def __init__(self, generator: Generator, stop: threading.Event, look: "Callable[[Track], None]") -> None:
        self.generator, self.stop, self.look = generator, stop, look
        raster = generator.model.target.config.raster
        self.columns, self.size = raster.columns, raster.tokens
        self._begin()

    def _begin(self) -> None:
        self.marks: list[Mark] = []
        self.steps: list[Step] = []
        self.tokens = torch.full((self.size,), -1)
        self.spent, self._first = 0.0, 0.0

    def __call__(self, step: Step) -> None:
        """Add one pass; StoppedError if the page was closed."""
        start, count = int(step.start[0]), int(step.counts[0])  # sync
        now = time.perf_counter()
        if self.stop.is_set():
            raise StoppedError
        if step.index == 0:
            self._begin()
            self._first = now
        self.steps.append(kept(step))
        self.tokens[start : start + count] = step.tokens[0, :count].cpu()
        self.marks.append(Mark(now - self._first - self.spent, start + count, step.index + 1))
        if start // self.columns < (start + count) // self.columns:
            self.look(self)
        self.spent += time.perf_counter() - now

    def mark_at(self, seconds: float) -> Mark:
        """Return the last mark up to a time."""
        return max(mark for mark in self.marks if mark.seconds <= seconds)

    def view(self, mark: Mark) -> "View":
        """Return the image as it was at a mark."""
        tokens = torch.where(torch.arange(self.size) < mark.known, self.tokens, -1).to(self.generator.model.device)
        return View(mark, partial_pixels(self.generator, tokens))


@dataclass(frozen=True)
class View:
    """An image under way: its mark and its pixels, grey where no token is known."""

    mark: Mark
    pixels: UInt8[Tensor, "h w 3"]

    @property
    def caption(self) -> str:
        """The numbers as text."""
        seconds, known, steps = self.mark
        return f"{seconds:.2f} s, {known} tokens, {known / steps:.2f} tokens per step"


@dataclass(frozen=True)
class Result:
    """Both finished images compared, and the acceptance map of the method's."""

    comparison: Comparison
    accepted: AcceptanceMap


@dataclass(frozen=True)
class Moment:
    """Both images after the same seconds; the last moment has the result."""

    plain: View
    other: View
    result: Result | None = None


class SideBySide:
    """Decodes a request by plain decoding and by a method, on one thread of its own.

    ValueError for a model without a VQ decoder.
    """

    def __init__(self, model: Model) -> None:
        if model.vq is None:
            raise ValueError(f"model {model.name} has no vqvae/ folder: it can make tokens but no images")
        self.model = model
        self._thread = ThreadPoolExecutor(1, "lantern-model")
        self._generator = lru_cache(4)(self._new_generator)

    @property
    def methods(self) -> list[str]:
        """Names of the methods for which the model has all parts, except plain decoding and "auto"."""
        return [name for name in METHODS if name not in ("plain", "auto") and has_parts(self.model, METHODS[name])]

    def choices(self, promise: Promise) -> list[tuple[str, str]]:
        """Return the methods of a promise, the default first: (name and summary, name)."""
        found = sorted((METHODS[name] for name in self.methods), key=lambda one: one.name != self.default.name)
        return [(f"{one.name}: {one.summary}", one.name) for one in found if one.promise == promise]

    @cached_property
    def default(self) -> Method:
        """The fastest exact method here: what "auto" chooses.

        Where that is plain decoding, it is the shortest window of `gumbel-jacobi`, which ends where it does not pay.
        """
        chosen = choose_method(self.model, "auto", report=lambda _: None)
        if chosen.exact and not chosen.is_plain:
            return chosen
        options = {"window": 2} | ({} if self.model.engine.captures else {"least": LEAST})
        return METHODS["gumbel-jacobi"].with_options(**options)

    def request(self, subject: str, seed: int) -> Request:
        """Return the request of a prompt, or of a class label as text; ValueError for one that the model lacks."""
        if self.model.takes_prompts:
            made = Request(prompt=subject.strip(), seed=seed)
        elif subject.strip().isdigit():
            made = Request(label=int(subject), seed=seed)
        else:
            raise ValueError(f"class is {subject[:40]!r}, wanted a number")
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed is {seed}, wanted a number from 0 to {MAX_SEED}")
        check_requests(self.model, [made])
        return made

    def moments(self, request: Request, method: str, sampling: Sampling) -> Iterator[Moment]:
        """Yield what both have decoded, row by row, and at the end the result.

        Decoding pauses until the next moment is taken, and ends when the iterator is closed. Errors of the model are
        raised here.
        """
        moments: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        stop, shown = threading.Event(), threading.Semaphore(0)

        def send(moment: Moment) -> None:
            moments.put(moment)
            if not shown.acquire(timeout=PATIENCE):  # the page must not take time from the decoding
                raise StoppedError

        done = self._thread.submit(self._decode, request, method, sampling, send, stop)
        done.add_done_callback(lambda _: moments.put(None))
        try:
            while (moment := moments.get()) is not None:
                yield moment
                shown.release()
        finally:
            stop.set()
            shown.release()
        done.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _new_generator(self, method: str, sampling: Sampling) -> Generator:
        is_default = method == self.default.name
        chosen = self.default if is_default else choose_method(self.model, method, sampling=sampling)
        return Generator(self.model, chosen, sampling)

    def _decode(
        self,
        request: Request,
        method: str,
        sampling: Sampling,
        send: Callable[[Moment], None],
        stop: threading.Event,
    ) -> None:
        plain, other = self._generator("plain", sampling), self._generator(method, sampling)
        for generator in (plain, other):
            warm_up(generator, request)
        fast = Track(other, stop, lambda track: None)
        quick, quick_seconds = decode(other, request, fast)

        def look(track: Track) -> None:
            mark = track.marks[-1]
            send(Moment(track.view(mark), fast.view(fast.mark_at(mark.seconds))))

        slow = Track(plain, stop, look)
        picture, seconds = decode(plain, request, slow)
        end = slow.view(slow.marks[-1])
        for before, after in pairwise(fast.marks):
            if after.seconds > end.mark.seconds and before.known // fast.columns < after.known // fast.columns:
                send(Moment(end, fast.view(after)))
        accepted = read_map(fast.steps, 0, fast.size, columns=fast.columns)
        result = Result(Comparison(picture, quick, seconds, quick_seconds), accepted)
        send(Moment(end, fast.view(fast.marks[-1]), result))


def decode(generator: Generator, request: Request, track: Track) -> tuple[Picture, float]:
    """Return the image of a request and its seconds of decoding, without those of the track."""
    (picture,) = make_batch(generator, [request], with_pixels=True, callback=track)
    return picture, picture.statistics.seconds["decode"] - track.spent


def image_html(pixels: UInt8[Tensor, "h w 3"], caption: str) -> str:
    """Return an image with its caption as HTML."""
    uri = data_uri(pixels, effort=0)
    return f'<figure class="side"><img src="{uri}" alt=""/><figcaption>{escape(caption)}</figcaption></figure>'


def map_html(result: Result) -> str:
    """Return the acceptance map of a result over its image, with its legend, as HTML."""
    picture = result.comparison.other
    assert picture.pixels is not None
    title = f"acceptance map of {picture.statistics.method}"
    return f'<div class="side">{draw_map(result.accepted, data_uri(picture.pixels), title=title)}</div>{legend()}'


def sentence(comparison: Comparison) -> str:
    """Return what happened in one sentence."""
    other = comparison.other.statistics
    if comparison.is_identical:
        image = "The same image, token for token"
    elif other.promise == "distribution":
        image = "Another image of the same distribution"
    elif other.promise == "tokens":
        image = f"Another image by rounding: {comparison.differing} of {other.tokens} tokens differ"
    elif isnan(other.total_variation):
        image = "Another image: total variation not measured"
    else:
        image = f"Another image: total variation {other.total_variation:.2f} a token"
    return f"{image}, {comparison.speedup:.1f} times as fast."


def table(comparison: Comparison) -> str:
    """Return what happened, and the numbers of a comparison as a Markdown table."""
    head, *rows = comparison.rows()
    lines = [head, ("---", "---:", "---:"), *rows]
    numbers = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{sentence(comparison)}**\n\n{numbers}"


def build_page(sides: SideBySide) -> Any:
    """Return the Gradio page; `launch` shows it. The theme and CSS are arguments of `launch` (`launch_options`)."""
    import gradio as gr

    model = sides.model
    groups = [(words, promise) for promise, words in GROUPS.items() if sides.choices(promise)]

    def offer(promise: Promise) -> Any:
        choices = sides.choices(promise)
        return gr.Dropdown(choices, value=choices[0][1])

    def fill(subject: str, method: str, guidance: float, seed: float, past: list[Any]) -> Iterator[tuple[Any, ...]]:
        try:
            request = sides.request(subject, int(seed))
            sampling = model.sampling(guidance=float(guidance))
            with_warnings(model, [request], warn=gr.Warning)
            yield "", "", "decoding by the method", "", past, past
            for moment in sides.moments(request, method, sampling):
                plain = image_html(moment.plain.pixels, f"plain: {moment.plain.caption}")
                other = image_html(moment.other.pixels, f"{method}: {moment.other.caption}")
                if moment.result is None:
                    yield plain, other, "decoding", "", past, past
                    continue
                comparison = moment.result.comparison
                assert comparison.other.pixels is not None
                label = f"{request.subject}, {comparison.other.statistics.method}, seed {request.seed}"
                past = [(to_image(comparison.other.pixels), label), *past][:KEPT]
                yield plain, other, table(comparison), map_html(moment.result), past, past
        except Exception as error:  # an error of one picture is shown on the page and ends nothing
            raise gr.Error(one_line(error), print_exception=False) from None

    with gr.Blocks(title=f"lantern: {model.name}", analytics_enabled=False) as page:
        gr.Markdown(f"# lantern: {model.name}\nPlain decoding and a method of speculative decoding, side by side.")
        past = gr.State([])
        with gr.Row():
            subject = gr.Textbox(
                "a red apple" if model.takes_prompts else "0",
                label="Prompt" if model.takes_prompts else "Class",
                elem_id="subject",
                scale=3,
            )
            guidance = gr.Slider(
                1, 20, model.sampling().guidance, step=0.1, label="Guidance", elem_id="guidance", min_width=210
            )
            seed = gr.Number(0, label="Seed", precision=0, minimum=0)
        with gr.Row():
            group = gr.Radio(groups, value=sides.default.promise, label="Image", elem_id="group", scale=1)
            choices = sides.choices(sides.default.promise)
            method = gr.Dropdown(choices, value=sides.default.name, label="Method", elem_id="method", scale=2)
        group.input(offer, group, method, show_progress="hidden")
        button = gr.Button("Generate", variant="primary", elem_id="generate")
        with gr.Row():
            plain, other = gr.HTML(label="plain", elem_id="plain"), gr.HTML(label="method", elem_id="other")
        with gr.Row():
            accepted, numbers = gr.HTML(elem_id="accepted"), gr.Markdown(elem_id="numbers")
        gallery = gr.Gallery(label="Past images", columns=8, elem_id="gallery", interactive=False)
        given, shown = [subject, method, guidance, seed, past], [plain, other, numbers, accepted, gallery, past]
        options: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress": "hidden"}
        gr.on([button.click, subject.submit], fill, given, shown, **options)
    return page.queue(max_size=16)


def launch_options() -> dict[str, Any]:
    """Return the options of `launch` for the looks of the page; it loads no fonts from elsewhere."""
    from gradio.themes import Default

    theme = Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    return {"css": CSS, "theme": theme, "footer_links": [], "quiet": True}
