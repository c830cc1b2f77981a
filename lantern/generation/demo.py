"""The page of `lantern demo`: plain decoding and a method fill their images side by side.

Both decode first, one after the other, so that nothing slows them. Then the page shows their rows again as they were
completed, both after the same seconds.
"""

import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.config import one_line
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.generation.choice import choose_method, has_parts
from lantern.generation.comparison import Comparison
from lantern.generation.generator import Generator, make_batch
from lantern.generation.images import Picture, save_options, to_image
from lantern.generation.requests import MAX_EXACT_SEED, Request, as_requests, check_requests, with_warnings
from lantern.methods import METHODS, Method
from lantern.models.folder import Model
from lantern.models.llamagen.text import list_names

GROUPS = {"tokens": "same image", "distribution": "same distribution", "relaxed": "relaxed"}  # in the order of the list
LONGEST = 4.0  # seconds in which both images are shown again; shorter decodings are shown at their own speed
RELAXED = 0.5  # a token is marked if the probability that only the relaxation accepted it is at least this
LEAST = 1.2  # chosen, not measured: tokens per step below which a default that nothing recommends goes on plainly
CSS = """
#gallery .grid-container { grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)) !important; }
.side img { width: 100%; max-width: 28rem; display: block; background: #808080; }
#numbers td, #numbers th { white-space: nowrap; padding: .3rem .4rem; font-size: .85rem; }
"""


class Shade(NamedTuple):
    """Legend, colour and opacity of the tokens of runs of `least` or more tokens."""

    least: int
    legend: str
    colour: str
    opacity: float


# Okabe and Ito's palette, from light to dark: the order is visible without distinguishing hues
SHADES = (
    Shade(2, "run of 2 or 3 tokens", "#f0e442", 0.60),
    Shade(4, "run of 4 to 7 tokens", "#56b4e9", 0.65),
    Shade(8, "run of 8 or more tokens", "#0072b2", 0.75),
)
MARK, MARK_COLOUR = "relaxed: accepted only because of the relaxation", "#d55e00"


class Mark(NamedTuple):
    """How far an image was after some seconds, and the places of the last step's relaxed tokens."""

    seconds: float
    known: int
    steps: int
    relaxed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Side:
    """A finished image, and how far it was after each step."""

    generator: Generator
    picture: Picture
    marks: list[Mark]

    def times(self) -> list[float]:
        """Return the seconds after which a row was complete."""
        marks, columns = [Mark(0.0, 0, 0), *self.marks], self.picture.columns
        return [new.seconds for old, new in pairwise(marks) if old.known // columns < new.known // columns]

    def at(self, seconds: float) -> tuple[Mark, UInt8[Tensor, "h w 3"]]:
        """Return how far the image was at a time, and its pixels, grey where no token was known."""
        mark = max(mark for mark in self.marks if mark.seconds <= seconds)
        return mark, self.generator.partial_pixels(self.picture.tokens, mark.known)


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

    @cached_property
    def examples(self) -> list[str]:
        """Class labels to click, or prompts, names that are recognised where the model has a list of them."""
        if not self.model.takes_prompts:
            return [str(label) for label in range(min(5, self.model.target.config.num_classes))]
        try:
            names = list_names(self.model.folder) if self.model.folder else []
        except ValueError:  # the model has no list
            names = []
        return names[:: max(1, len(names) // 5)][:5] or ["a red apple"]

    def choices(self) -> list[tuple[str, str]]:
        """Return the methods for which the model has all parts, by promise: (promise, name and summary; name)."""
        found = [one for name, one in METHODS.items() if name not in ("plain", "auto") and has_parts(self.model, one)]
        found.sort(key=lambda one: (one.name != self.default.name, list(GROUPS).index(one.promise)))
        return [(f"{GROUPS[one.promise]}: {one.name}, {one.summary}", one.name) for one in found]

    @cached_property
    def default(self) -> Method:
        """The exact method that "auto" chooses; where it chooses none, a window that ends where it does not pay."""
        chosen = choose_method(self.model, "auto", report=lambda _: None)
        if chosen.exact and not chosen.is_plain:
            return chosen
        options = {"window": 2} | ({} if self.model.engine.captures else {"least": LEAST})
        return METHODS["gumbel-jacobi"].with_options(**options)

    def request(self, subject: str, seed: int) -> Request:
        """Return the request of a prompt, or of a class label as text; ValueError for one that the model lacks."""
        subject = subject.strip()
        if not self.model.takes_prompts and not subject.isdecimal():
            raise ValueError(f"class is {subject[:40]!r}, wanted a number")
        if not 0 <= seed <= MAX_EXACT_SEED:
            raise ValueError(f"seed is {seed}, wanted a number from 0 to {MAX_EXACT_SEED}")
        made = as_requests([subject if self.model.takes_prompts else int(subject)], seed)
        check_requests(self.model, made)
        return made[0]

    def decode(self, request: Request, method: str, sampling: Sampling) -> Side:
        """Return the image of a request, decoded after a warm-up; errors of the model are raised here."""
        return self._thread.submit(self._decode, request, method, sampling).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _new_generator(self, method: str, sampling: Sampling) -> Generator:
        is_default = method == self.default.name
        chosen = self.default if is_default else choose_method(self.model, method, sampling=sampling)
        return Generator(self.model, chosen, sampling)

    def _decode(self, request: Request, method: str, sampling: Sampling) -> Side:
        generator, marks = self._generator(method, sampling), list[Mark]()
        first = spent = 0.0  # seconds of the first token, and of this callback

        def watch(step: Step) -> None:
            nonlocal first, spent
            known, now = int(step.start[0] + step.counts[0]), time.perf_counter()  # sync, then the time
            if step.index == 0:  # decoding may start again
                first, spent = now, 0.0
                marks.clear()
            marks.append(Mark(now - first - spent, known, step.index + 1, relaxed_places(step)))
            spent += time.perf_counter() - now

        generator.warm_up([request])
        (picture,) = make_batch(generator, [request], with_pixels=True, callback=watch)
        seconds = {**picture.statistics.seconds, "decode": picture.statistics.seconds["decode"] - spent}
        return Side(generator, replace(picture, statistics=replace(picture.statistics, seconds=seconds)), marks)


def relaxed_places(step: Step) -> tuple[int, ...]:
    """Return the places of the first image's tokens that probably only a relaxation accepted in a step."""
    if step.verdict is None or step.verdict.cost is None:
        return ()
    accepted = min(int(step.counts[0]), int(step.verdict.length[0]))
    chances = step.verdict.cost.relaxed[0, :accepted].tolist()
    return tuple(int(step.start[0]) + i for i, chance in enumerate(chances) if chance >= RELAXED)


def data_uri(pixels: UInt8[Tensor, "h w 3"], form: str, **options: Any) -> str:
    """Return an image as the data URI of a file of this format, marked as generated, with Pillow's options."""
    to_image(pixels).save(saved := BytesIO(), **save_options(form, {}) | options)
    return f"data:image/{form};base64,{b64encode(saved.getvalue()).decode()}"


def image_html(name: str, mark: Mark, pixels: UInt8[Tensor, "h w 3"], file: str = "") -> str:
    """Return an image with how far it was, and a link that saves it as a PNG file of a name, as HTML."""
    text = f"{name}: {mark.seconds:.2f} s, {mark.known} tokens, {mark.known / mark.steps:.2f} tokens per step"
    image = f'<img src="{data_uri(pixels, "webp", quality=90, method=0)}" alt="{text}"/>'
    link = f' <a download="{file}" href="{data_uri(pixels, "png")}">Download</a>' if file else ""
    return f'<figure class="side">{image}<figcaption>{text}{link}</figcaption></figure>'


def acceptance_map(side: Side, steps: int) -> tuple[Image, list[tuple[Float[np.ndarray, "h w"], str]]]:
    """Return an image after so many steps and what is drawn over it, with legends, as `gradio.AnnotatedImage` takes it.

    Tokens are shaded by the number of tokens of their step; the middle of a relaxed one is marked. Later ones are grey.
    """
    marks, tokens = side.marks[:steps], side.picture.tokens
    pixels = side.generator.partial_pixels(tokens, marks[-1].known)
    runs = torch.tensor([mark.known for mark in marks]).diff(prepend=torch.zeros(1, dtype=torch.long))
    length = pad(runs.repeat_interleave(runs), (0, len(tokens) - marks[-1].known)).view(-1, side.picture.columns)
    side_of_token = len(pixels) // len(length)
    relaxed = torch.zeros(length.numel())
    relaxed[[place for mark in marks for place in mark.relaxed]] = 1.0

    def over(opacity: Float[Tensor, "rows columns"], margin: int = 0) -> Float[np.ndarray, "h w"]:
        token = torch.ones(side_of_token - 2 * margin, side_of_token - 2 * margin)
        return torch.kron(opacity, pad(token, [margin] * 4)).numpy()

    ends = [*(shade.least for shade in SHADES[1:]), length.numel() + 1]
    drawn = [
        (over(((length >= shade.least) & (length < end)) * shade.opacity), shade.legend)
        for shade, end in zip(SHADES, ends, strict=True)
    ]
    drawn.append((over(relaxed.view_as(length), side_of_token // 4), MARK))
    return to_image(pixels), [(mask, legend) for mask, legend in drawn if mask.any()]


def table(comparison: Comparison) -> str:
    """Return what happened, and the numbers of a comparison as a Markdown table."""
    head, *rows = comparison.rows()
    lines = "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---", "---:", "---:"), *rows])
    return f"**{comparison.sentence}**\n\n{lines}"


def build_page(sides: SideBySide) -> Any:
    """Return the Gradio page; `launch` shows it. The theme and CSS are arguments of `launch` (`launch_options`)."""
    import gradio as gr

    model = sides.model

    def fill(subject: str, method: str, guidance: float, seed: float, past: list[Any]) -> Iterator[tuple[Any, ...]]:
        try:
            (request,) = with_warnings(model, [sides.request(subject, int(seed))], warn=gr.Warning)
            sampling = model.sampling(guidance=float(guidance))
            yield unfinished("", "", f"decoding by {method}", past)
            other = sides.decode(request, method, sampling)
            yield unfinished("", "", "plain decoding", past)
            plain = sides.decode(request, "plain", sampling)
            *times, end = max(plain, other, key=lambda side: side.marks[-1]).times()
            begin = time.perf_counter()
            for now in times:
                time.sleep(max(0.0, begin + now * min(1.0, LONGEST / end) - time.perf_counter()))
                yield unfinished(image_html("plain", *plain.at(now)), image_html(method, *other.at(now)), "", past)
            numbers = table(Comparison(plain.picture, other.picture))
            label = f"{request.subject}, {other.picture.statistics.method}, seed {request.seed}"
            past = [(to_image(other.at(end)[1]), label), *past][:24]
            left = image_html("plain", *plain.at(end), f"plain-{request.seed}.png")
            right = image_html(method, *other.at(end), f"{method}-{request.seed}.png")
            count = len(other.marks)
            slider = gr.Slider(maximum=count, value=count, visible=True)
            yield left, right, numbers, acceptance_map(other, count), past, past, other, slider
        except Exception as error:  # an error of one image is shown on the page and ends nothing
            raise gr.Error(one_line(error), print_exception=False) from None

    def unfinished(left: str, right: str, text: str, past: list[Any]) -> tuple[Any, ...]:
        return left, right, text, None, past, past, None, gr.Slider(visible=False)

    def up_to(side: Side | None, steps: int) -> Any:
        return None if side is None else acceptance_map(side, steps)  # None: the server has started again

    @cache
    def first() -> tuple[Any, ...]:
        return list(fill(sides.examples[0], sides.default.name, model.sampling().guidance, 0, []))[-1]

    with gr.Blocks(title=f"lantern: {model.name}", analytics_enabled=False) as page:
        gr.Markdown(f"# lantern: {model.name}\nPlain decoding and a method of speculative decoding, side by side.")
        past, decoded, own = gr.State([]), gr.State(), model.sampling().guidance
        with gr.Row():
            what = "Prompt" if model.takes_prompts else "Class"
            subject = gr.Textbox(sides.examples[0], label=what, elem_id="subject", scale=3)
            guidance = gr.Slider(1, 20, own, step=0.1, label="Guidance", elem_id="guidance", min_width=210)
            seed = gr.Number(0, label="Seed", precision=0, minimum=0)
        method = gr.Dropdown(sides.choices(), value=sides.default.name, label="Method", elem_id="method")
        gr.Examples([[one] for one in sides.examples], [subject], label="Examples", elem_id="examples")
        button = gr.Button("Generate", variant="primary", elem_id="generate")
        with gr.Row():
            plain, other = gr.HTML(label="plain", elem_id="plain"), gr.HTML(label="method", elem_id="other")
        with gr.Row():
            colours = {shade.legend: shade.colour for shade in SHADES} | {MARK: MARK_COLOUR}
            with gr.Column(min_width=300):  # side by side where both fit
                accepted = gr.AnnotatedImage(
                    color_map=colours, label="Tokens of a step; one where unmarked", elem_id="accepted"
                )
                step = gr.Slider(1, 2, step=1, label="Steps", elem_id="steps", visible=False)
            with gr.Column(min_width=300):
                numbers = gr.Markdown(elem_id="numbers")
        gallery = gr.Gallery(label="Past images", columns=8, height=200, elem_id="gallery", interactive=False)
        given = [subject, method, guidance, seed, past]
        shown = [plain, other, numbers, accepted, gallery, past, decoded, step]
        options: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress": "hidden"}
        page.load(first, None, shown, **options)  # an image before the first click, made for the first visitor
        gr.on([button.click, subject.submit], fill, given, shown, **options)
        step.input(up_to, [decoded, step], accepted, trigger_mode="always_last", **options)
    return page.queue(max_size=16)


def launch_options() -> dict[str, Any]:
    """Return the options of `launch` for the page: its looks, without fonts from elsewhere, and no uploads."""
    from gradio.themes import Default

    theme = Default(font=["sans-serif"], font_mono=["monospace"])
    return {"css": CSS, "theme": theme, "footer_links": [], "quiet": True, "max_file_size": 0}
