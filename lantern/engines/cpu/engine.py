"""The engine `cpu`: targets whose passes run in C++ (`pass.cpp`), and fused steps (`steps.cpp`).

A fused step of plain decoding, or of a window of samples, is one C++ program. Codes and statistics are those of
`decoding.plain` and `decoding.loop`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import (
    Callback,
    Condition,
    Drafter,
    DraftTree,
    Generation,
    Prompt,
    Sampler,
    Step,
    Target,
    Verdict,
    Verifier,
)
from lantern.core.types import Scores as ScoresLike
from lantern.decoding.cache import StaticCache
from lantern.decoding.forced import PassScores
from lantern.decoding.loop import Stopwatch, report
from lantern.decoding.prompt import Start, start
from lantern.drafters.windows.jacobi import TRIAL, chain_shape, is_slow, random_codes
from lantern.engines.cpu import build
from lantern.engines.cpu.kernels import (
    LANES,
    PANEL,
    Arena,
    LayerArgs,
    ModelArgs,
    PackedLayer,
    PassArgs,
    arguments,
    check_weights,
    kind_of,
    linear,
    sampler_of,
    uniforms,
)
from lantern.engines.engine import Engine, FusedDecoder, Module
from lantern.engines.prepared import PreparedTarget, WeightCache, read_in_passes
from lantern.models.llamagen.transformer import Scores
from lantern.verifiers.gumbel import GumbelVerifier

PATIENCE = 0.1  # seconds of steps per call; between calls the interpreter handles signals


class PackedPass:
    """A target's packed weights, and the call that runs a pass over them.

    If `spent` is a float64 tensor (threads, PARTS), passes add the seconds that each thread spent on each part.
    """

    def __init__(self, target: Any) -> None:
        config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        check(target)
        self.call = build.library().lantern_pass
        self.dim, self.vocab = config.dim, config.vocab_size
        self.spent: Tensor | None = None
        arena = Arena.for_module(target)
        # the tensors whose addresses pass.cpp holds
        self._layers = [PackedLayer.of(block, arena) for block in target.layers]
        self._norm, self._head = arena.wide(target.norm.weight), arena.panels(target.output.weight)
        self._rope = target.rotary.table.clone()
        layers = (LayerArgs * config.n_layer)(*(arguments(layer.tensors) for layer in self._layers))
        hidden = target.layers[0].feed_forward.w2.weight.shape[1]
        kind = kind_of(self._head, *(panels for layer in self._layers for panels in layer.linears))
        shape = (config.dim, config.n_head, config.n_layer, hidden, config.vocab_size, kind)
        places = (tensor.data_ptr() for tensor in (self._norm, self._head, self._rope))
        self.model = ModelArgs(*shape, config.norm_eps, layers, *places)

    def __call__(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Float[Tensor, "b n s"],
        *,
        cache: Any,
        slots: Int[Tensor, "b n"],
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score inputs, as `Transformer.forward` with a `StaticCache` in fp32."""
        rows, nodes = inputs.shape[:2]
        inputs, positions, places = inputs.float().contiguous(), positions.contiguous(), slots.contiguous()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        logits = torch.empty(rows, nodes, self.vocab)
        features = torch.empty(rows, nodes, self.dim)
        fused = torch.empty(rows, nodes, len(taps) * self.dim) if taps else None
        tapped = (ctypes.c_int32 * len(taps))(*taps)
        self.call(
            ctypes.byref(self.model),
            ctypes.byref(
                PassArgs(
                    *(rows, nodes, cache.slots, torch.get_num_threads(), len(taps)),
                    *(inputs.data_ptr(), positions.data_ptr(), places.data_ptr(), mask.data_ptr()),
                    *(mask.stride(0), mask.stride(1), cache.buffer.data_ptr(), cache.buffer.stride(0)),
                    ctypes.addressof(tapped),
                    *(None if fused is None else fused.data_ptr(), features.data_ptr(), logits.data_ptr()),
                    None if self.spent is None else self.spent.data_ptr(),
                )
            ),
        )
        return Scores(logits, features.to(self.dtype), None if fused is None else fused.to(self.dtype))

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Apply the head, as `Transformer.head`."""
        return linear(features, self._head, None, self.vocab)


_PASSES = WeightCache(PackedPass)


class CpuTarget(PreparedTarget):
    """A target that scores inputs in C++ if its cache is in fp32, and otherwise by torch, which also reads prompts."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.make_uniforms = uniforms
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights again if they have changed."""
        self.program = _PASSES.get(self.module)

    def forward(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> ScoresLike:
        """Score inputs, as `Target.__call__`."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != torch.float32:
            return self.module(inputs, positions, mask, cache=cache, slots=slots, taps=taps)
        return self.program(inputs, positions, mask, cache=cache, slots=slots, taps=taps)

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts one by one, so that they are as independent of each other as passes are."""
        read = partial(self.module.read, rows=rows, whole=whole, taps=taps)
        return Prompt.joined(list(read_in_passes(read, condition, 1).values()))

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return features, as `Target.features`, in C++."""
        return self.forward(*args, **kwargs).features

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Apply the head in C++."""
        return self.program.head(features)

    def sampler(self, sampling: Sampling, noise: Any) -> Sampler | None:
        """Return the sampler in C++, None for top-p."""
        return sampler_of(sampling, noise)


def check(target: Any) -> None:
    """Raise ValueError for a device, dtype, quantization or widths that `pass.cpp` does not support."""
    config = target.config
    check_weights(target)
    hidden = target.layers[0].feed_forward.w2.weight.shape[1]
    widths: Sequence[tuple[str, int, int]] = (
        ("dim", config.dim, PANEL),
        ("vocab_size", config.vocab_size, PANEL),
        ("width of a head", config.head_dim, LANES),
        ("width of the feed-forward layer", hidden, LANES),
    )
    for name, width, expected in widths:
        if width % expected:
            raise ValueError(
                f"the model's {name} is {width}, the cpu engine needs a multiple of {expected}: use --engine eager"
            )


class ImageArgs(ctypes.Structure):
    """`ImageArgs` of steps.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("top_k", "interval")),
        *((name, ctypes.c_float) for name in ("guidance", "temperature")),
        *((name, ctypes.c_void_p) for name in ("noise", "random", "known", "window", "grid", "start", "counts")),
        *((name, ctypes.c_void_p) for name in ("sampled", "passes", "accepted", "reached", "finite")),
    ]


class StepArgs(ctypes.Structure):
    """`StepArgs` of steps.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("images", "nodes", "codes", "prefix", "conditioning")),
        *((name, ctypes.c_int32) for name in ("is_staged", "is_half")),
        *((name, ctypes.c_void_p) for name in ("embeddings", "of")),
        ("seconds", ctypes.c_double),
    ]


@torch.no_grad()
def generate(
    target: CpuTarget,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    drafter: Drafter | None = None,
    callback: Callback | None = None,
    keep_steps: bool = False,
    is_timed: bool = False,
    **how: Any,
) -> Generation:
    """Decode as `loop.generate` or `plain.generate`, for a drafter with `sample_window` or none.

    `how` is cache and prompts, as for `prefill.start`.
    """
    watch, steps = Stopwatch(condition.device, is_timed), list[Step]()
    kept = steps if keep_steps else None
    # 1) the prompt gives code 0
    stepper, first = begin(target, condition, sampling=sampling, keys=keys, drafter=drafter, **how)
    report(first, callback, kept)
    watch.lap("prefill")
    alone, is_watched, seconds = FusedPass([stepper]), callback is not None or keep_steps, 0.0
    while not stepper.is_done():
        # 2) steps, one per call if they are reported
        alone.step(0.0 if is_watched else PATIENCE)
        if is_watched:
            report(stepper.last(), callback, kept)
        if stepper.nodes != alone.nodes:
            seconds += alone.seconds
            alone = FusedPass([stepper])
    watch.lap("walk")
    if is_timed:
        watch.seconds["score"] = seconds + alone.seconds
        watch.seconds["walk"] -= watch.seconds["score"]
    return stepper.generation(steps, watch.seconds)


@torch.no_grad()
def begin(
    target: CpuTarget,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    drafter: Drafter | None = None,
    **how: Any,
) -> "tuple[FusedStepper, Step]":
    """Begin a generation whose steps `decoding.joint` takes; return its stepper and the step of code 0."""
    stage = 0 if drafter is None else drafter.max_nodes
    prompt = start(target, condition, sampling=sampling, keys=keys, stage=stage, **how)
    stepper = FusedStepper(target, prompt, sampling, drafter)
    return stepper, stepper.first


class FusedStepper:
    """The state of a generation, in memory that `lantern_steps` writes to; tensors are as in `steps.cpp`.

    `first` is the step that gives code 0, `nodes` the size of a pass.
    """

    def __init__(self, target: CpuTarget, prompt: Start, sampling: Sampling, drafter: Drafter | None) -> None:
        images, self.count = len(prompt.mask), target.config.block_size
        self.target, self.prompt, self.drafter = target, prompt, drafter
        self.nodes, self._index = 1 if drafter is None else drafter.max_nodes, 0
        self.known, self.start, self.counts, self.passes = torch.ones(4, images, dtype=torch.long).unbind()
        self.grid = torch.zeros(images, self.count, dtype=torch.long)
        self.window, self.sampled = torch.zeros(2, images, self.nodes, dtype=torch.long).unbind()
        self.accepted, self.reached = torch.zeros(2, images, self.nodes - 1, dtype=torch.long).unbind()
        self.finite = torch.isfinite(prompt.logits.sum((1, 2, 3)))
        self._noise, self._random = prompt.noise.gumbel_table(), None
        if drafter is not None and drafter.sample_window == "random":
            where = torch.arange(self.count).expand(images, -1)
            self._random = random_codes(prompt.noise, where, target.config.vocab_size).contiguous()
        self._shape = None if drafter is None else chain_shape(drafter.depth, torch.device("cpu"))
        self._scored = self.nodes, self._shape, self.window
        self.first = self._sample_first(sampling)
        self.images = [self._image(i, sampling) for i in range(images)]
        self._results: tuple[Tensor, Tensor] | None = None
        self._counts = self.known.numpy()  # the same memory, which Python reads faster

    @property
    def group(self) -> tuple[object, ...]:
        """What generations that share passes have in common: weights, the form of their caches, and nodes."""
        return (id(self.target.program), self.prompt.cache.form, self.nodes)

    @property
    def is_on_trial(self) -> bool:
        """Whether steps are counted, after which slow drafting stops (`Drafter.least_codes`)."""
        return self.drafter is not None and self.drafter.least_codes > 0 and self._index < TRIAL

    def _sample_first(self, sampling: Sampling) -> Step:
        """Sample code 0 from the logits of the prompt, and fill the window behind it."""
        prompt, place = self.prompt, torch.zeros_like(self.known)[:, None]
        first = (sampling.scores(prompt.logits, place) + prompt.noise.gumbel(place)).argmax(-1)
        self.grid[:, :1] = self.window[:] = first
        if self._random is not None:
            self.window[:, 1:] = self._random[:, torch.arange(1, self.nodes).clamp(max=self.count - 1)]
        features = prompt.features[:, :, -1:].flatten(0, 1)
        scores = PassScores(prompt.logits.flatten(0, 1), features)
        return Step(0, place[:, 0], torch.ones_like(self.known), first, scores)

    def _image(self, i: int, sampling: Sampling) -> ImageArgs:
        """Return the arguments of an image: its settings, and the addresses of its rows of all tensors."""
        rows = (self.known, self.window, self.grid, self.start, self.counts, self.sampled)
        counters = (self.passes, self.accepted, self.reached, self.finite)
        return ImageArgs(
            *(min(sampling.top_k, self.target.config.vocab_size), min(sampling.guidance_interval, self.count)),
            *(float(sampling.guidance), float(sampling.temperature)),
            *(None if tensor is None else tensor[i].data_ptr() for tensor in (self._noise, self._random)),
            *(tensor[i].data_ptr() for tensor in (*rows, *counters)),
        )

    @staticmethod
    def together(steppers: "Sequence[FusedStepper]", earlier: StaticCache | None) -> "FusedPass":
        """Return what takes the steps of generations of one group; `earlier` is for `StaticCache.joined`."""
        return FusedPass(steppers, earlier)

    def join(self, logits: Float[Tensor, "rows n v"], features: Float[Tensor, "rows n c"]) -> None:
        """Take part in a pass that writes its results there."""
        self._results = logits, features  # not the pass, since a cycle of references would delay freeing the cache

    def before(self, is_one: bool) -> None:
        """Prepare for steps; with `is_one`, a single one, `last` can return it."""
        self._index += 1
        scored = self.window.clone() if is_one and self._shape is not None else self.window
        self._scored = self.nodes, self._shape, scored

    def after(self) -> None:
        """After slow steps, let later passes score the last code alone, as plain decoding does."""
        if self.drafter is not None and self._index == TRIAL and is_slow(self.known, self.drafter.least_codes):
            self.nodes, self._shape = 1, None

    def is_done(self) -> bool:
        """Return whether all codes are known."""
        return min(self._counts) >= self.count

    def last(self) -> Step:
        """Return the last step; its scores are overwritten by the next."""
        assert self._results is not None
        logits, features = self._results
        scores = Scores(logits, features.to(self.target.tok_embeddings.weight.dtype))
        nodes, shape, scored = self._scored
        codes = self.sampled[:, :nodes].clone()
        arguments = (self._index, self.start.clone(), self.counts.clone(), codes, scores)
        if shape is None:
            return Step(*arguments)
        length = (scored[:, 1:] == codes[:, :-1]).long().cumprod(1).sum(1)
        drafts = torch.arange(1, nodes)
        path = torch.where(drafts <= length[:, None], drafts, 0)
        verdict = Verdict(path, length, codes.gather(1, length[:, None])[:, 0])
        return Step(*arguments, DraftTree(scored, shape, "gumbel"), verdict)

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """Return the finished grids."""
        zeros = torch.zeros(3, len(self.known))
        return Generation(
            codes=self.grid,
            passes=self.passes,
            accepted=self.accepted,
            reached=self.reached,
            relaxed=zeros[0],
            total_variation=zeros[1],
            steps=steps,
            seconds=seconds,
            total_variation_max=None if self.drafter is None else zeros[2],
            is_finite=self.finite,
        )


class FusedPass:
    """The pass that generations of one group share, with their steps around it: inputs, outputs and arguments.

    Their caches become views of `cache`. Generations have settings and numbers of known codes of their own.
    """

    def __init__(self, steppers: Sequence[FusedStepper], earlier: StaticCache | None = None) -> None:
        self.steppers, one = steppers, steppers[0]
        caches = [stepper.prompt.cache for stepper in steppers]
        is_whole = len(caches) == 1 and caches[0].buffer.is_contiguous()
        used = [caches[0].prefix + max(stepper.known.tolist()) for stepper in steppers]
        self.cache = cache = caches[0] if is_whole else StaticCache.joined(caches, earlier, used)
        self._program, config = one.target.program, one.target.config
        self.nodes = nodes = one.nodes
        rows, first = cache.images * cache.rows, cache.first_stage_slot
        self.inputs, self.features = torch.empty(2, rows, nodes, config.dim).unbind()
        self.logits = torch.empty(rows, nodes, config.vocab_size)
        self._positions = torch.empty(rows, nodes, dtype=torch.long)
        self._places = (torch.arange(nodes) + first).repeat(rows, 1)
        self._mask = torch.full((rows, nodes, cache.slots), -torch.inf)
        at = 0
        for stepper in steppers:
            prefix = stepper.prompt.prefix.flatten(0, 1)[:, None]
            lines = slice(at, at := at + len(prefix))
            self._mask[lines, :, : cache.prefix] = prefix
            stepper.join(self.logits[lines], self.features[lines])
        if cache.stage:
            self._mask[..., first : first + nodes] = torch.full((nodes, nodes), -torch.inf).triu(1)
        taken = (self.inputs, self._positions, self._places, self._mask)
        self._args = PassArgs(
            *(rows, nodes, cache.slots, torch.get_num_threads(), 0),
            *(tensor.data_ptr() for tensor in taken),
            *(self._mask.stride(0), self._mask.stride(1), cache.buffer.data_ptr(), cache.buffer.stride(0)),
            *(None, None),
            *(self.features.data_ptr(), self.logits.data_ptr()),
        )
        self._images = (ImageArgs * cache.images)(*(image for stepper in steppers for image in stepper.images))
        embeddings = one.target.tok_embeddings.weight
        self._steps = StepArgs(
            *(cache.images, nodes, one.count, cache.prefix, config.cls_token_num),
            *(cache.stage > 0, embeddings.dtype == torch.bfloat16),
            embeddings.data_ptr(),
            ctypes.addressof(self._images),
            0.0,
        )

    @property
    def seconds(self) -> float:
        """Seconds spent in passes of the target."""
        return self._steps.seconds

    def step(self, patience: float = 0.0) -> None:
        """Take steps for `patience` seconds, at least one, until an image is complete; one step while on trial."""
        if any(stepper.is_on_trial for stepper in self.steppers):
            patience = 0.0
        for stepper in self.steppers:
            stepper.before(not patience)
        arguments = (self._program.model, self._args, self._steps)
        build.library().lantern_steps(*map(ctypes.byref, arguments), ctypes.c_double(patience))
        for stepper in self.steppers:
            stepper.after()


@dataclass(frozen=True)
class CpuEngine(Engine):
    """Runs a pass as one C++ program, and whole steps of plain decoding and sample-match windows.

    The bits of a code's logits depend on nothing that is scored with it, so `reproducible` holds without cost.
    """

    name: ClassVar[str] = "cpu"
    has_free_rows: ClassVar[bool] = True

    def available(self, target: Target, *, can_wait: bool = True) -> str | None:
        """Return a reason for other devices, dtypes and widths, and where the library is missing."""
        if (reason := super().available(target, can_wait=can_wait)) is not None:
            return reason
        if self.weights == "int4":
            return "the cpu engine reads weights in full or in int8, int4 was given: use --engine eager"
        try:
            check(target)
        except ValueError as error:
            return str(error)
        missing = build.missing()
        if missing is None:
            return None
        try:
            build.find_compiler()
        except ValueError as error:
            return str(error)
        return None if can_wait else f"{missing}: `lantern doctor --build` or `--engine cpu` builds it"

    def prepare_drafter(self, module: Module) -> Module:
        """Return a drafter's module with packed layers, if they fit."""
        from lantern.engines.cpu.drafter import packed_drafter

        return packed_drafter(module, int8=self.weights == "int8")

    def prepare_vq(self, vq: Module) -> Module:
        """Return LlamaGen's tokenizer with packed convolutions in its decoder; others as they are."""
        from lantern.engines.cpu.vq import packed_vq

        return packed_vq(vq)

    def fused_decoder(
        self, target: Target, sampling: Sampling, drafter: Drafter | None, verifier: Verifier | None
    ) -> FusedDecoder | None:
        """Return the decoder of fused steps: plain decoding, and windows of the target's samples; not for top-p."""
        is_window = drafter is not None and drafter.sample_window is not None
        if sampling.top_p < 1 or not isinstance(target, CpuTarget):
            return None
        if drafter is not None and not (is_window and isinstance(verifier, GumbelVerifier)):
            return None
        given: dict[str, Any] = {"sampling": sampling, "drafter": drafter}
        return FusedDecoder(partial(generate, target, **given), partial(begin, target, **given))

    def keeps_codes(self, target: Target, *, nodes: int, lines: int) -> bool:
        """Return True: the bits of a code depend on nothing that is scored with it."""
        return True

    @property
    def rounds_wide(self) -> bool:
        """False: passes are reproducible as they are."""
        return False

    def window(self, target: Target, codes_per_pass: Mapping[int, float] | None = None) -> int:
        """Return the window with the most codes per second, by the times of passes on this machine."""
        from lantern.engines.pass_times import CODES, best_window, pass_times

        return best_window(pass_times(self, target), codes_per_pass or CODES)

    def _prepare(self, target: Any) -> Target:
        return CpuTarget(target)
