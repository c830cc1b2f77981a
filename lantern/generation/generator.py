"""From prompts or classes to images, for the command line, the pipeline and the evaluation.

A `Decoder` is a method built for a target; a `Generator` has one, and a model's other parts. Where memory runs out, on
a CPU or a GPU, the batch is halved and made again. `Progress` and `Canvas` follow images while they are made.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lantern.core.config import as_number, check_number, is_debugging, is_out_of_memory, one_line
from lantern.core.sampling import HeldSampling, Sampling
from lantern.core.types import Callback, Condition, Drafter, Generation, Step, Target, Verifier
from lantern.core.weights import on_device, outside_modes
from lantern.decoding.cache import CacheKind, PromptCache, reading_passes
from lantern.decoding.checked import CheckedState
from lantern.decoding.loop import State, begin, check_modes, run
from lantern.decoding.plain import NoDrafts, Plain
from lantern.decoding.statistics import Stopwatch
from lantern.engines.engine import EAGER, Engine
from lantern.generation.choice import choose_method
from lantern.generation.images import NotFiniteError, Picture, Statistics
from lantern.generation.init_image import with_init_image
from lantern.generation.requests import Request, as_requests, captions, check_requests, with_warnings
from lantern.methods import Method, find
from lantern.methods.method import Promise, build
from lantern.models.folder import Model
from lantern.verifiers.gumbel import GumbelVerifier

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from lantern.drafters.records import Recorder


HALVED = "out of memory with {} images at once: continuing with {}"
INTERVAL = 0.1  # seconds between two reads from the device, or two calls by the C++ engine
PROMPT_SLOTS = 32  # prompts of tokens are padded to a multiple of it where each length would be captured
WARM_UP = 8  # passes that are not measured
TABLE_COLUMNS = 100  # of a proximity table, where a method needs fewer


def release_memory() -> None:
    """Release unreferenced memory; call it outside of the `except` block, which keeps frames alive."""
    import gc

    graphs = sys.modules.get("lantern.engines.cuda.graphs")
    if graphs is not None:
        graphs.forget_all()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def generate(
    model: Model,
    requested: Sequence[Request | str | int],
    *,
    seed: int = 0,
    method: str | Method | None = None,
    sampling: Sampling | None = None,
    settings: Mapping[str, Any] | None = None,
    batch: int = 1,
    with_pixels: bool = True,
    callback: Callback | None = None,
    interval: float = 0.0,
    on_halved: Callable[[int, int], None] | None = None,
    debug: bool | None = None,
    record: "Recorder | None" = None,
    init_image: "str | Path | Image | None" = None,
    keep_rows: int | None = None,
    mask_image: "str | Path | Image | None" = None,
) -> Iterator[Picture]:
    """Make images, `batch` at a time, and yield each when its batch is done.

    A request may be a prompt or a class label, whose images then have the noise of `seed`.
    `method` is a name of the registry or a method, None the model's default; `settings` are options of the method, see
    `choose_method`. All arguments are checked before the first image: ValueError. `callback` receives every step, with
    an `interval` in seconds only some of them (`decoding.loop.run`), `record` the drafts of all. Images keep the first
    `keep_rows` rows of tokens of `init_image`, or what `mask_image` does not cover (`with_init_image`).

    UnknownPromptWarning for a prompt without a known word; the statistics of its images have the message too.
    Where memory runs out the batch is halved and `on_halved` is called with the size that did not fit and the one that
    does; the images do not change. MemoryError if a single image does not fit. NotFiniteError, after the other
    images of its batch, for an image with a distribution that was NaN or infinite; with `debug` (None: by
    LANTERN_DEBUG) it names the layer.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is {str(model)[:40]!r}, wanted a model, as load_model returns it")
    batch = as_number(batch)
    check_number("batch", batch, 1, kind=int)
    kept: dict[str, Any] = {"init_image": init_image, "keep_rows": keep_rows, "mask_image": mask_image}
    requested = ready(model, as_requests(requested, seed), with_pixels=with_pixels, **kept)
    sampling = model.sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {str(sampling)[:40]!r}, wanted a Sampling, as model.sampling() returns it")
    chosen = choose_method(model, method, settings, sampling=sampling, batch=min(batch, len(requested)))
    how = {"batch": batch, "on_halved": on_halved, "debug": debug, "record": record, "interval": interval}
    generator = Generator(model, chosen, sampling, **how)
    return make_batches(generator, requested, with_pixels=with_pixels, callback=callback)


def ready(
    model: Model,
    requested: Sequence[Request],
    *,
    with_pixels: bool,
    warn: Callable[[str], None] | None = None,
    **kept: Any,
) -> list[Request]:
    """Return requests as a `Generator` takes them: with warnings, and with what images `kept` of an init image.

    `kept` are arguments of `with_init_image`, `warn` is that of `with_warnings`. ValueError for what the model cannot
    serve.
    """
    check_requests(model, requested, with_pixels=with_pixels)
    return with_init_image(model, with_warnings(model, requested, warn=warn), **kept)


def neighbours_for(model: Model, columns: int) -> Int[Tensor, "v k"]:
    """Return the proximity table of the model's codebook, with at least `columns` columns.

    ValueError for a model without a codebook.
    """
    codebook = model.codebook
    if codebook is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, of whose codebook a proximity table is made")
    vectors = codebook.detach().cpu().float()
    most = max(columns, min(TABLE_COLUMNS, len(vectors) - 1))
    return _table(vectors.numpy().tobytes(), vectors.shape[1], most, model.device).to(model.device)


@lru_cache(maxsize=4)
def _table(codebook: bytes, width: int, columns: int, device: torch.device) -> Int[Tensor, "v k"]:
    from lantern.verifiers.relaxations.neighbours import proximity_table

    vectors = torch.frombuffer(bytearray(codebook), dtype=torch.float32).view(-1, width)
    return proximity_table(vectors.to(device), columns).cpu()


@dataclass
class Decoder:
    """A method built for a target. It decodes one batch at a time and is not for several threads.

    Plain decoding has no drafter and no verifier, nor has a method of row fronts. `prompts` keeps prompts
    between calls.
    """

    method: Method
    target: Target
    sampling: Sampling
    drafter: Drafter | None
    verifier: Verifier | None
    held: HeldSampling | None = None  # what drafter and verifier read, where rounds are captured
    prompts: PromptCache | None = None
    engine: Engine = EAGER
    anew: "Callable[[], Decoder] | None" = None  # builds it again
    _kept: State | None = None

    def begin(self, condition: Condition, *, is_joined: bool = False, **how: Any) -> State:
        """Begin a generation, as `decoding.loop.begin` with its arguments.

        With `is_joined` its rounds can be joined with those of others (`Engine.drive`).
        """
        self.target.refresh()
        # fused passes join generations by themselves, but not those in which tokens are given
        is_fused = self.engine.fuses_plain(self.sampling) and how.get("forced") is None
        # an add-on has a cache of its own, as long as the prompt
        is_padded = self.engine.captures and condition.tokens is not None and not self.method.made.needs
        kind = CacheKind(self.engine.is_wide, self.engine.is_fp8, PROMPT_SLOTS if is_padded else 1)
        with on_device(self.target.tok_embeddings.weight.device):
            state = self._state(is_joined and not is_fused)
            begin(state, condition, kind=kind, **{"prompts": self.prompts, **how})
        is_alone = type(state) is not State or condition.batch > 1 or how.get("forced") is not None
        is_alone = is_alone or self.method.made.has_foreign  # drafters that may keep more than they name
        if (anew := self.anew) is not None and is_joined and self.engine.captures:
            state.kind = None if is_alone else (self.method.name, repr(self.method.settings), self.sampling.form)
            state.batch_of = lambda images: anew().begin(
                condition.select([0] * images), is_joined=True, keys=list(how["keys"]) * images
            )
        return state

    def generate(
        self, condition: Condition, *, callback: Callback | None = None, interval: float = 0.0, **how: Any
    ) -> Generation:
        """Decode a batch; the arguments are those of `decoding.loop.run` and `begin`."""
        state = self.begin(condition, **how)
        with on_device(self.target.tok_embeddings.weight.device):
            rounds = self.engine.drive([state])
            return run(state, rounds, callback=callback, interval=interval)

    def _state(self, is_joined: bool) -> State:
        """Return the state of a generation; an engine that keeps it has one for all."""
        if self._kept is not None:
            return self._kept
        sampling: Sampling = self.held or self.sampling
        may_look = not self.engine.captures and self.target.tok_embeddings.weight.device.type == "cpu"
        if (front := self.method.made.front) is not None:
            from lantern.decoding.row_front import RowFront

            made: State = RowFront(self.target, sampling, **front)
        elif self.drafter is not None and self.verifier is not None:
            kind = CheckedState if may_look and self.method.made.has_foreign else State
            made = kind(self.target, sampling, self.drafter, self.verifier)
        elif is_joined:
            made = State(self.target, sampling, NoDrafts(), GumbelVerifier())
        else:
            made = Plain(self.target, sampling)
        made.may_look = may_look
        if self.engine.captures:
            self._kept = made
        return made

    def promise(self, images: int) -> Promise:
        """Return what the images of a batch have in common with plain decoding's, as this engine keeps it."""
        promise, config = self.method.promise, self.target.config
        if promise == "tokens" and config.family != "llamagen" and config.processes > 1:
            return "distribution"  # sums round in another order
        if promise != "tokens" or self.drafter is None:
            return promise
        keeps = self.engine.keeps_bits(self.target, self.drafter.max_nodes, images * self.sampling.rows)
        return "tokens" if keeps else "distribution"


def build_decoder(
    method: str | Method,
    target: Target,
    *,
    sampling: Sampling,
    add_ons: Mapping[str, nn.Module] = MappingProxyType({}),
    neighbours: Int32[Tensor, "v k"] | None = None,
    codebook: Float[Tensor, "v d"] | None = None,
    prompts: PromptCache | None = None,
    engine: Engine = EAGER,
) -> Decoder:
    """Build the decoder of a method.

    `add_ons` are the model's drafter and its other trained networks by name, as `lantern.models.folder` reads them.
    Relaxations need `neighbours`, the proximity table, or `codebook`, the vectors of the tokens; with the codebook they
    also report the latent distance that they moved.

    ValueError for an unknown name, for what the method needs and the model lacks, and for components that do not fit.
    """
    given = {"sampling": sampling, "add_ons": add_ons, "neighbours": neighbours, "codebook": codebook}
    anew = partial(build_decoder, method, target, **given, prompts=prompts, engine=engine)
    method = find(method) if isinstance(method, str) else method
    engine = engine.resolve(target)
    while True:
        prepared = engine.prepare(target)
        held = HeldSampling(**vars(sampling)) if engine.captures else None
        if method.made.drafter is None:
            return Decoder(method, prepared, sampling, None, None, held, prompts, engine, anew)
        give = {
            "target": prepared,
            "sampling": held or sampling,
            "parts": {name: engine.prepare_part(add_ons[name]) for name in method.made.needs if name in add_ons},
            "neighbours": neighbours,
            "codebook": codebook,
        }
        drafter, verifier = build(method, give, greedy=sampling.is_greedy)
        check_modes(drafter, verifier)
        reason = engine.why_not(target, drafter)
        if reason is None:
            return Decoder(method, prepared, sampling, drafter, verifier, held, prompts, engine, anew)
        if not engine.reason or engine.name == "eager":
            raise ValueError(f'method "{method.name}": {reason}')
        # The engine was chosen automatically and does not suit this drafter.
        engine = engine.as_eager(reason)


def watchable(model: Model) -> Model:
    """Return a model with the engine `eager`: only its layers can be watched."""
    return replace(model, engine=model.engine.as_eager("--debug"))


@contextmanager
def watched_layers(target: Any, drafter: nn.Module | None = None) -> Iterator[None]:
    """Check the output of every module within the context; NotFiniteError names the first that gives NaN, by its path.

    Every check waits for the device, so this is for debugging only.
    """
    names: dict[nn.Module, str] = {}
    for owner, module in (("drafter", drafter), ("transformer", target)):
        named = () if module is None else module.named_modules(prefix=owner)
        names |= {part: name for name, part in named if name != owner}

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names and isinstance(output, Tensor) and not bool(output.isfinite().all()):  # sync
            raise NotFiniteError(f"{names[module]} gave {'NaN' if bool(output.isnan().any()) else 'infinity'}")

    with register_module_forward_hook(check):
        yield


@dataclass(eq=False)
class Generator:
    """A model with a method and a sampling, assembled once for many batches.

    `batch` is the number of images made at once, halved each time memory runs out. `on_halved`, `debug`, `record` and
    `interval` are those of `generate`. `parts` are those of an earlier one with the same weights and method, and
    with the same sampling, or one of its `form` where rounds are captured.
    """

    model: Model
    method: Method
    sampling: Sampling
    _: KW_ONLY
    batch: int = 1
    on_halved: Callable[[int, int], None] | None = None
    debug: bool | None = None
    record: "Recorder | None" = None
    interval: float = 0.0
    parts: Decoder = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.is_stopped, self._most_pixels = False, None
        self.debug = is_debugging() if self.debug is None else self.debug
        self.model = watchable(self.model) if self.debug else self.model
        self.interval = self.interval if self.record is None else 0.0
        if self.parts is None:
            self.assemble()

    @outside_modes
    def assemble(self) -> None:
        """Build the drafter and verifier anew, which drops the caches that they keep between batches."""
        model, method, sampling = self.model, self.method, self.sampling
        columns = method.made.columns(model.target.config.vocab_size)
        codebook = None if method.exact else model.codebook
        self.parts = build_decoder(
            method,
            model.target,
            sampling=sampling,
            add_ons=model.add_ons,
            neighbours=neighbours_for(model, columns) if columns else None,
            codebook=None if codebook is None else codebook.to(model.device),
            prompts=model.prompts,
            engine=model.engine,
        )
        if self.record is not None:
            self.record.watch(self.parts.drafter)

    def condition(self, requested: Sequence[Request]) -> Condition:
        """Return the target's conditioning for each request."""
        labels = [request.label for request in requested if request.label is not None]
        if labels:
            return Condition(labels=torch.tensor(labels, device=self.model.device))
        given = [request.condition for request in requested if request.condition is not None]
        texts = [request.text for request in requested if request.text is not None]
        found = Condition.joined(given) if given else captions(self.model, texts)
        negative = [request.negative for request in requested if request.negative is not None]
        texts = [request.negative_prompt for request in requested if request.negative_prompt is not None]
        if negative or texts:
            found = replace(found, negative=Condition.joined(negative) if negative else captions(self.model, texts))
        return found

    def warm_up(self, requested: Sequence[Request]) -> None:
        """Decode a few passes of a batch, so that compilation and allocation are not measured."""
        self.decode(self.condition(requested), requested, lambda step: step.index >= WARM_UP)

    @torch.inference_mode(False)  # what is kept between calls must not belong to the mode of one
    def decode(
        self, condition: Condition, requested: Sequence[Request], callback: Callback | None = None
    ) -> Generation:
        """Decode the tokens of each request; in debug mode NotFiniteError names the first layer that gives NaN."""
        watching = [one for one in (callback, self.record) if one is not None]

        def call(step: Step) -> bool:
            return any([one(step) is True for one in watching])

        called: dict[str, Any] = {"callback": call if watching else None, "interval": self.interval}
        with watched_layers(self.model.target, self.model.drafter) if self.debug else nullcontext():
            made = self.parts.generate(condition, **self._fixed(requested), **called)
        self.is_stopped = made.known is not None
        return made

    def begin(self, request: Request) -> State:
        """Begin an image whose rounds are joined with those of others; its `step` is that of token 0."""
        return self.parts.begin(self.condition([request]), **self._fixed([request]), is_joined=True)

    def _fixed(self, requested: Sequence[Request]) -> dict[str, Any]:
        """Return the keys of the noise, and the tokens (b n) that images keep, -1 where they are generated."""
        keys, forced = [(request.seed, request.number) for request in requested], None
        if any(request.forced is not None for request in requested):
            forced = given_tokens(requested, self.model.target.config.block_size)
        return {"keys": keys, "forced": forced, "sampling": self.sampling}

    def pixels(self, tokens: Int[Tensor, "b n"]) -> UInt8[Tensor, "b h w 3"]:
        """Decode tokens to pixels, of fewer images at once where memory runs out."""
        made = list[Tensor]()
        while len(tokens):
            some = tokens[: self._most_pixels]
            try:
                with torch.inference_mode():
                    made.append(self.model.pictures(some))
            except Exception as error:  # others, and that of a single image, are raised again
                if not is_out_of_memory(error) or len(some) == 1:
                    raise
                self._most_pixels = len(some) // 2
            else:
                tokens = tokens[len(some) :]
                continue
            release_memory()
        return torch.cat(made)

    def partial_pixels(self, tokens: Int[Tensor, " n"], known: int) -> UInt8[Tensor, "h w 3"]:
        """Return the image of a grid whose first `known` tokens are decided: rows below the last of them are grey."""
        raster, missing = self.model.target.config.raster, len(tokens) - known
        shown = torch.cat([tokens[:known], tokens[known - 1 : known].expand(missing)])
        pixels = self.pixels(shown[None])[0].clone()
        pixels[-(-known // raster.columns) * (len(pixels) // raster.rows) :] = 128
        return pixels


def given_tokens(requested: Sequence[Request], tokens: int) -> Int[Tensor, "b n"]:
    """Return the tokens that images keep, -1 where they are generated."""
    free = torch.full((tokens,), -1)
    return torch.stack([free if request.forced is None else request.forced for request in requested])


def make_batches(
    generator: Generator, requested: Sequence[Request], *, with_pixels: bool, callback: Callback | None = None
) -> Iterator[Picture]:
    """Yield the images batch by batch; where memory runs out the batches get smaller.

    The batch in which the callback returns True is the last one; its missing tokens are 0. NotFiniteError after the
    finite images of a batch with others.
    """
    done = too_many = 0
    while done < len(requested):
        batch = requested[done : done + generator.batch]
        try:
            pictures = make_batch(generator, batch, with_pixels=with_pixels, callback=callback)
        except NotFiniteError as error:
            yield from error.sound
            raise
        except Exception as error:  # other errors are raised again
            if not is_out_of_memory(error):
                raise
            if len(batch) == 1:
                raise MemoryError(f"out of memory with a single image: {one_line(error)}") from error
            too_many, generator.batch = too_many or len(batch), len(batch) // 2
        else:
            if too_many and generator.on_halved is not None:
                generator.on_halved(too_many, generator.batch)
            elif too_many:
                warnings.warn(HALVED.format(too_many, generator.batch), RuntimeWarning, stacklevel=2)
            done, too_many = done + len(batch), 0
            yield from pictures
            if generator.is_stopped:
                return
            continue
        generator.assemble()  # drops references that the failed attempt may have left
        release_memory()


@outside_modes
def make_batch(
    generator: Generator, requested: Sequence[Request], *, with_pixels: bool, callback: Callback | None = None
) -> list[Picture]:
    """Make the images of one batch; NotFiniteError, which holds the finite ones, if some are not finite."""
    clock = Stopwatch(generator.model.device, True)
    condition = generator.condition(requested)
    clock.lap("text")
    generation = generator.decode(condition, requested, callback)
    clock.lap("decode")
    return finish_batch(generator, requested, generation, seconds=clock.seconds, with_pixels=with_pixels)


def finish_batch(
    generator: Generator,
    requested: Sequence[Request],
    generation: Generation,
    *,
    seconds: Mapping[str, float],
    with_pixels: bool,
    images: int | None = None,
) -> list[Picture]:
    """Decode the tokens of a batch to pixels and add statistics.

    `seconds` are those spent so far, by phase; `images` is the largest number decoded together, None: those requested.
    NotFiniteError, which holds the finite images, if some are not finite.
    """
    images = images or len(requested)
    clock = Stopwatch(generator.model.device, True)
    pixels = generator.pixels(generation.tokens) if with_pixels else None
    clock.lap("vq")
    shares = {phase: value / len(requested) for phase, value in (dict(seconds) | clock.seconds).items()}
    promise, columns = generator.parts.promise(images), generator.model.target.config.raster.columns
    method, total = generator.method, generation.tokens.shape[1]
    counts = [total] * len(requested) if generation.known is None else generation.known.tolist()
    given, pictures = given_tokens(requested, total), list[Picture]()
    read = reading_passes(given)
    for i, (request, count) in enumerate(zip(requested, counts, strict=True)):
        made = int((given[i, :count] < 0).sum())
        sums, of = (generation.latent_distance, generation.excess), max(made, 1)
        distance, excess = (None if each is None else float(each[i]) / of for each in sums)
        if count < total:
            warning = f"interrupted: {count} of {total} tokens were decoded, the others are 0"
            request = replace(request, warning=warning)
        statistics = Statistics(
            method=method.name,
            is_exact=method.exact,
            tokens=made,
            steps=int(generation.steps[i]) - read,
            accepted=tuple(generation.accepted[i].tolist()),
            reached=tuple(generation.reached[i].tolist()),
            relaxed=float(generation.relaxed[i]) / of,
            total_variation=float(generation.total_variation[i]) / of,
            total_variation_max=float(generation.total_variation_max[i]),
            latent_distance=0.0 if method.exact else distance,
            excess=excess,
            seconds=shares,
            method_reason=method.reason,
            promise=promise if count == total else None,
            forced=int((given[i] >= 0).sum()),
        )
        of_image = None if pixels is None else pixels[i]
        pictures.append(Picture(request, generation.tokens[i], of_image, statistics, columns, images))
    is_finite = generation.is_finite.tolist()  # sync
    if not all(is_finite):
        lost = pictures[is_finite.index(False)].request
        raise NotFiniteError(
            f"{lost.subject[:60]!r}, seed {lost.seed}, image {lost.number}: the model's distribution became NaN or"
            f" infinite in {generator.model.dtype}: try --dtype fp32; --debug names the layer",
            [picture for picture, is_sound in zip(pictures, is_finite, strict=True) if is_sound],
        )
    return pictures


class Progress:
    """A bar over the tokens of a run, shown only where stderr is a terminal.

    It is the callback of a generation of `pictures` images of `tokens` tokens each, within the context of its `bar`.
    Tokens of a batch that ran out of memory are subtracted when the next batch begins. Counts are read from the device
    at most ten times a second. `bar` is a bar of tqdm in place of its own.
    """

    def __init__(self, pictures: int, tokens: int, *, is_quiet: bool = False, bar: Any = None) -> None:
        from tqdm import tqdm

        # with disable=None tqdm shows the bar only if stderr is a terminal
        how: dict[str, Any] = {"disable": True if is_quiet else None, "leave": False, "dynamic_ncols": True}
        self.bar = tqdm(total=pictures * tokens, unit=" tokens", **how) if bar is None else bar
        self._tokens, self._done = tokens, 0
        self._known: Int[Tensor, " b"] | None = None
        self._steps, self._next = 0, 0.0

    def __call__(self, step: Step) -> bool | None:
        """Add one pass."""
        if self.bar.disable:
            return
        if step.index == 0:
            if self._known is not None and int(self._known.min()) >= self._tokens:  # sync
                self._done += len(self._known) * self._tokens
            self._next, self._first = 0.0, step.counts
        self._known, self._steps = step.start + step.counts, step.index + 1
        if time.monotonic() >= self._next:
            self.show()
            self._next = time.monotonic() + INTERVAL

    def show(self) -> None:
        """Show the tokens of all passes so far: tokens per step of one image, finished and slowest of several."""
        if self._known is None:
            return
        known = self._known.tolist()  # sync
        if len(known) == 1:
            made = known[0] + 1 - int(self._first)  # of the tokens of the first step all but one are given
            text = f"{made / max(self._steps, 1):.2f} tokens per step"
        else:
            done = sum(count >= self._tokens for count in known)
            text = f"{done}/{len(known)} done, slowest {min(known)}/{self._tokens}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self._done + sum(known) - self.bar.n)

    def say(self, line: str) -> None:
        """Write a line on stderr, above the bar."""
        self.bar.write(line, file=sys.stderr)


class Canvas:
    """The token grids of a batch while they fill: `tokens` (b n), -1 where no token is known yet."""

    tokens: Int[Tensor, "b n"]

    def __init__(self, tokens: int) -> None:
        self._size = tokens
        self.tokens = torch.empty(0, tokens, dtype=torch.long)

    def add(self, step: Step) -> None:
        """Add the tokens of one pass; the first pass of a batch starts new grids."""
        if step.index == 0:
            self.tokens = torch.full((len(step.start), self._size), -1, device=step.tokens.device)
        is_new = torch.arange(step.tokens.shape[1], device=step.tokens.device) < step.counts[:, None]
        image, place = is_new.nonzero(as_tuple=True)
        self.tokens[image, step.start[image] + place] = step.tokens[image, place]
