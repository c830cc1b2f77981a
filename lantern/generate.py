"""From prompts or classes to pictures: the whole way, for the command, the pipeline and evaluation alike."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.catalog import METHODS, Method, build, find, layer_by_layer, neighbour_columns, suited
from lantern.clock import Clock
from lantern.debugging import is_debugging
from lantern.memory import BatchSize, in_batches, is_out_of_memory, release_memory, warn_of_halving
from lantern.model_folder import Model
from lantern.models.llamagen.vqvae import to_uint8
from lantern.picture import Picture
from lantern.records import Recorder
from lantern.requests import Request, check_requests
from lantern.sampling import Sampling
from lantern.soundness import NotFiniteError, watched_layers
from lantern.statistics import Statistics
from lantern.types import Callback, Condition, Generation, Step

if TYPE_CHECKING:
    from lantern.tuning.costs import Costs

LOG = logging.getLogger("lantern")


def generate(
    model: Model,
    asked: Sequence[Request],
    *,
    method: str | Method | None = None,
    sampling: Sampling | None = None,
    settings: Mapping[str, Any] | None = None,
    batch: int = 1,
    wants_pixels: bool = True,
    callback: Callback | None = None,
    on_halved: Callable[[int, int], None] = warn_of_halving,
    debug: bool | None = None,
    record: Recorder | None = None,
) -> Iterator[Picture]:
    """Make pictures, `batch` at a time, and hand them over as they are done.

    `method` is a name of the catalog, None the model's own; `settings` are that method's own, see `choose_method`.
    Everything is checked before the first picture is begun: ValueError says what cannot be. `record` is told of every
    step's drafts.

    Where memory runs out the batch is halved and `on_halved` told how many were too many and how many fit; the
    pictures are the same. MemoryError if there is no room for one. NotFiniteError, after the sound pictures of its
    batch, for a picture whose laws were NaN or infinite; with `debug` (None: as LANTERN_DEBUG says) it names the layer.
    """
    check_requests(model, asked)
    if wants_pixels and model.vq is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, without which there are codes but no pictures")
    law = sampling or model.sampling()
    size = BatchSize(batch, on_halved)
    chosen = choose_method(model, method, settings, sampling=law)
    decoder = Decoder(model, chosen, law, size=size, debug=debug, record=record)
    return _one_by_one(draw_batches(decoder, asked, wants_pixels=wants_pixels, callback=callback))


def choose_method(
    model: Model,
    name: str | Method | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    sampling: Sampling | None = None,
    tell: Callable[[str], None] | None = None,
) -> Method:
    """The method of a name, with some of its `options` changed: the tree, and of relaxed methods k, delta and the like.

    None is the model's own method; a window that nobody chose is as the engine wants it. "auto" becomes the one that a
    profile of `lantern tune` recommends for this machine and `sampling`; without one the exact method that the model
    has a drafter for, if that says that it was trained for these weights, else plain decoding. Why a profile or the
    drafter is not used is told to `tell`, by default the log. ValueError for a setting that the method does not take.
    """
    own = str(model.generation.get("method", "auto"))
    method = name if isinstance(name, Method) else suited(find(name or own), model.engine)
    if method.name == "auto":
        method = _behind_auto(model, method, sampling or model.sampling(), tell or LOG.info)
    return method.with_options(**settings or {})


def neighbours_for(model: Model, columns: int) -> Int[Tensor, "v k"]:
    """The model's proximity table; made from the codebook where none so wide was saved. ValueError without either."""
    codebook = model.codebook
    if model.neighbours is not None and (model.neighbours.shape[1] >= columns or codebook is None):
        return model.neighbours
    if codebook is None:
        raise ValueError(f"model {model.name} has neither a proximity table nor a vqvae/ folder to make it from")
    from lantern.relaxations.neighbours import proximity_table

    return proximity_table(codebook, columns).to(model.device)


def codebook_for(model: Model) -> Float[Tensor, "v d"] | None:
    """The codes' vectors where the model's target is; None where it has no vqvae/ folder."""
    codebook = model.codebook
    return None if codebook is None else codebook.to(model.device)


def costs_for(model: Model) -> "Costs | None":
    """What steps take on this machine, if `lantern tune` has measured it."""
    from lantern.tuning.profile import measured_costs

    return measured_costs(model)


def both(callback: Callback | None, record: Recorder | None) -> Callback | None:
    """One callback that calls what there is of two."""
    if callback is None or record is None:
        return callback or record

    def call(step: Step) -> None:
        callback(step)
        record(step)

    return call


class Decoder:
    """A model with a method and a law, put together once for many batches.

    `size` is how many pictures it makes at once; `debug` and `record` as in `generate`.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        sampling: Sampling,
        *,
        size: BatchSize | None = None,
        debug: bool | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.model, self.method, self.sampling, self.record = model, method, sampling, record
        self.size = size or BatchSize(1)
        self.debug = is_debugging() if debug is None else debug
        self.put_together()

    def put_together(self) -> None:
        """Builds the parts anew, which drops the caches that they keep from one batch to the next."""
        model, method, sampling = self.model, self.method, self.sampling
        columns = neighbour_columns(method)
        self.parts = build(
            method,
            model.target,
            sampling=sampling,
            drafter_module=model.drafter,
            trained=model.trained,
            neighbours=neighbours_for(model, columns) if columns else None,
            codebook=codebook_for(model) if method.relaxation else None,
            prompts=model.prompts,
            # layers can be watched only one by one
            engine=layer_by_layer(model.engine) if self.debug else model.engine,
            costs=costs_for(model) if method.policy else None,
        )
        if self.record is not None:
            self.record.watch(self.parts.drafter)

    def condition(self, asked: Sequence[Request]) -> Condition:
        """What the target is told of each picture."""
        labels = [request.label for request in asked if request.label is not None]
        if labels:
            return Condition(labels=torch.tensor(labels, device=self.model.device))
        assert self.model.text is not None
        prompts = [request.prompt for request in asked if request.prompt is not None]
        different = list(dict.fromkeys(prompts))
        found = self.model.text.encode(different, slots=self.model.target.config.cls_token_num)
        rows = [different.index(prompt) for prompt in prompts]
        return Condition(embeddings=found.embeddings[rows], mask=found.mask[rows])

    def decode(self, condition: Condition, asked: Sequence[Request], callback: Callback | None = None) -> Generation:
        """The codes of each picture; in debug mode NotFiniteError names the layer whose NaN made laws of NaN."""
        keys = [(request.seed, request.number) for request in asked]
        watched = watched_layers(self.model.target, self.model.drafter) if self.debug else nullcontext()
        with watched:
            return self.parts.generate(condition, keys=keys, callback=both(callback, self.record))

    def pixels(self, codes: Int[Tensor, "b n"]) -> UInt8[Tensor, "b h w 3"]:
        """Codes to bytes; in halves where memory runs out, so that the codes are not lost."""
        assert self.model.vq is not None
        try:
            with torch.inference_mode():
                return to_uint8(self.model.vq.decode(codes))
        except Exception as error:  # what is not out of memory goes on
            if not is_out_of_memory(error):
                raise
            self.size.halve(len(codes), error)
        release_memory()
        half = len(codes) // 2
        return torch.cat([self.pixels(codes[:half]), self.pixels(codes[half:])])


def draw_batches(
    decoder: Decoder, asked: Sequence[Request], *, wants_pixels: bool, callback: Callback | None = None
) -> Iterator[list[Picture]]:
    """Make all pictures, as many at once as the decoder is to, and fewer where memory runs out."""

    def attempt(some: Sequence[Request]) -> list[Picture]:
        return draw_batch(decoder, some, wants_pixels=wants_pixels, callback=callback)

    return in_batches(asked, decoder.size, attempt=attempt, forget=decoder.put_together)


def draw_batch(
    decoder: Decoder, asked: Sequence[Request], *, wants_pixels: bool, callback: Callback | None = None
) -> list[Picture]:
    """Make the pictures of one batch; NotFiniteError holds those that are sound if some are not."""
    clock = Clock(decoder.model.device)
    condition = decoder.condition(asked)
    clock.lap("text")
    generation = decoder.decode(condition, asked, callback)
    clock.lap("decode")
    pictures = finish_batch(decoder, asked, generation, seconds=clock.seconds, wants_pixels=wants_pixels)
    is_finite = [True] * len(asked) if generation.is_finite is None else generation.is_finite.tolist()  # sync
    if not all(is_finite):
        lost = asked[is_finite.index(False)]
        raise NotFiniteError(
            f"{lost.subject[:60]!r}, seed {lost.seed}, image {lost.number}: the model's law became NaN or infinite"
            f" in {decoder.model.dtype}: try --dtype fp32; --debug names the layer",
            [picture for picture, is_sound in zip(pictures, is_finite, strict=True) if is_sound],
        )
    return pictures


def finish_batch(
    decoder: Decoder,
    asked: Sequence[Request],
    generation: Generation,
    *,
    seconds: Mapping[str, float],
    wants_pixels: bool,
) -> list[Picture]:
    """Decode the codes of a batch to pixels and put the figures beside them; `seconds` are those spent so far."""
    clock = Clock(decoder.model.device)
    pixels = decoder.pixels(generation.codes) if wants_pixels else None
    clock.lap("vq")
    shares = {phase: value / len(asked) for phase, value in (dict(seconds) | clock.seconds).items()}
    return [
        Picture(
            request=request,
            codes=generation.codes[i],
            pixels=None if pixels is None else pixels[i],
            statistics=_statistics(decoder, generation, i, shares),
            batch=len(asked),
        )
        for i, request in enumerate(asked)
    ]


def _one_by_one(batches: Iterator[list[Picture]]) -> Iterator[Picture]:
    try:
        for pictures in batches:
            yield from pictures
    except NotFiniteError as error:
        yield from error.sound
        raise


def _behind_auto(model: Model, auto: Method, sampling: Sampling, tell: Callable[[str], None]) -> Method:
    """What a profile recommends, if the model can; else the method that "auto" is another name of."""
    from lantern.tuning.candidates import needs_drafter
    from lantern.tuning.profile import chosen_method

    chosen = chosen_method(model, sampling, tell)
    has_parts = chosen is not None and all(part in model.trained for part in chosen.parts)
    if chosen is not None and has_parts and (model.drafter is not None or not needs_drafter(chosen)):
        return chosen
    if model.drafter is None:
        return METHODS["plain"]
    if model.drafter.config.target is None:
        tell("nobody measured the model's drafter and it does not say for which weights it was trained: `lantern tune`")
        return METHODS["plain"]
    twins = (dataclasses.replace(method, name=auto.name, summary=auto.summary) for method in METHODS.values())
    return next(method for method, twin in zip(METHODS.values(), twins, strict=True) if twin == auto)


def _statistics(decoder: Decoder, generation: Generation, i: int, seconds: Mapping[str, float]) -> Statistics:
    codes, exact = generation.codes.shape[1], decoder.method.exact
    largest, distance = generation.total_variation_max, generation.latent_distance
    return Statistics(
        method=decoder.method.name,
        is_exact=exact,
        codes=codes,
        passes=int(generation.passes[i]),
        accepted=tuple(generation.accepted[i].tolist()),
        reached=tuple(generation.reached[i].tolist()),
        relaxed=float(generation.relaxed[i]) / codes,
        total_variation=float(generation.total_variation[i]) / codes,
        total_variation_max=0.0 if largest is None else float(largest[i]),
        latent_distance=(None if distance is None else float(distance[i]) / codes) if not exact else 0.0,
        seconds=seconds,
    )
