"""From prompts or classes to pictures: the whole way, for the command, the pipeline and evaluation alike."""

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.catalog import METHODS, Method, build, find, neighbour_columns
from lantern.model_folder import Model
from lantern.models.llamagen.vqvae import to_uint8
from lantern.requests import Request, check_requests
from lantern.sampling import Sampling
from lantern.statistics import Statistics
from lantern.types import Callback, Condition, Generation

LOG = logging.getLogger("lantern")


@dataclass(frozen=True)
class Picture:
    """A finished picture: its codes in raster order, its pixels if they were asked for, and how it came about."""

    request: Request
    codes: Int[Tensor, " n"]
    pixels: UInt8[Tensor, "h w 3"] | None
    statistics: Statistics

    @property
    def grid(self) -> list[list[int]]:
        """The codes as rows of a square."""
        side = round(len(self.codes) ** 0.5)
        return self.codes.view(side, side).tolist()

    @property
    def tokens_sha256(self) -> str:
        """Digest of the codes as little-endian 32-bit numbers: equal digests, equal codes."""
        return hashlib.sha256(self.codes.cpu().to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


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
) -> Iterator[Picture]:
    """Make pictures, `batch` at a time, and hand them over as they are done.

    `method` is a name of the catalog, None the model's own; `settings` are that method's own, see `choose_method`.
    Everything is checked before the first picture is begun: ValueError says what cannot be.
    """
    check_requests(model, asked)
    if wants_pixels and model.vq is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, without which there are codes but no pictures")
    law = sampling or model.sampling()
    decoder = Decoder(model, choose_method(model, method, settings, sampling=law), law)
    return _generate(decoder, asked, batch, wants_pixels, callback)


def choose_method(
    model: Model,
    name: str | Method | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    sampling: Sampling | None = None,
    tell: Callable[[str], None] | None = None,
) -> Method:
    """The method of a name, with some of its `options` changed: the tree, and of relaxed methods k, delta and the like.

    None is the model's own method; "auto" becomes the one that a profile of `lantern tune` recommends for this machine
    and `sampling`, without one the exact method that the model has a drafter for. Why a profile is not used is told
    to `tell`, by default the log. ValueError for a setting that the method does not take.
    """
    method = name if isinstance(name, Method) else find(name or str(model.generation.get("method", "auto")))
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
    return None if model.codebook is None else model.codebook.to(model.device)


class Decoder:
    """A model with a method and a law, put together once for many batches."""

    def __init__(self, model: Model, method: Method, sampling: Sampling) -> None:
        self.model, self.method, self.sampling = model, method, sampling
        columns = neighbour_columns(method)
        self.parts = build(
            method,
            model.target,
            sampling=sampling,
            drafter_module=model.drafter,
            neighbours=neighbours_for(model, columns) if columns else None,
            codebook=codebook_for(model) if method.relaxation else None,
        )

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
        """The codes of each picture."""
        keys = [(request.seed, request.number) for request in asked]
        return self.parts.generate(condition, keys=keys, callback=callback)

    def pixels(self, codes: Int[Tensor, "b n"]) -> UInt8[Tensor, "b h w 3"]:
        """Codes to bytes."""
        assert self.model.vq is not None
        with torch.inference_mode():
            return to_uint8(self.model.vq.decode(codes))


class Clock:
    """Seconds by phase, waiting for the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under `phase`."""
        if self._is_cuda:
            torch.cuda.synchronize()  # sync
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def draw_batch(
    decoder: Decoder, asked: Sequence[Request], *, wants_pixels: bool, callback: Callback | None = None
) -> list[Picture]:
    """Make the pictures of one batch."""
    clock = Clock(decoder.model.device)
    condition = decoder.condition(asked)
    clock.lap("text")
    generation = decoder.decode(condition, asked, callback)
    clock.lap("decode")
    return finish_batch(decoder, asked, generation, seconds=clock.seconds, wants_pixels=wants_pixels)


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
        )
        for i, request in enumerate(asked)
    ]


def _generate(
    decoder: Decoder, asked: Sequence[Request], batch: int, wants_pixels: bool, callback: Callback | None
) -> Iterator[Picture]:
    for start in range(0, len(asked), batch):
        yield from draw_batch(decoder, asked[start : start + batch], wants_pixels=wants_pixels, callback=callback)


def _behind_auto(model: Model, auto: Method, sampling: Sampling, tell: Callable[[str], None]) -> Method:
    """What a profile recommends, if the model can; else the method that "auto" is another name of."""
    from lantern.tuning.candidates import needs_drafter
    from lantern.tuning.profile import chosen_method

    chosen = chosen_method(model, sampling, tell)
    if chosen is not None and (model.drafter is not None or not needs_drafter(chosen)):
        return chosen
    if model.drafter is None:
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
