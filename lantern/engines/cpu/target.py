"""Targets and drafters whose layers run in C++ (`pass.cpp`), and the C++ library seen from torch.

In this order: packed weights in the order in which `pass.cpp` reads them, functions of tensors, targets, drafters.
"""

import contextlib
import copy
import ctypes
import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from lantern.core.sampling import Key, Purpose, Sampling
from lantern.core.types import Condition, Prompt, Sampler, Scores
from lantern.core.weights import (
    DraftLayer,
    Int8Weight,
    PreparedTarget,
    WeightCache,
    is_quantized,
    left_out,
    quantized,
    read_in_passes,
    submodules,
)
from lantern.decoding.statistics import write_tokens
from lantern.engines.cpu.build import library
from lantern.engines.cpu.structures import array, cpp
from lantern.models.llamagen.transformer import CaptionEmbedder, RMSNorm, Transformer, TransformerConfig

PANEL, LANES = 32, 16
LINE = 64  # bytes of a cache line, at which every tensor begins
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # of weights; in int8 they are bytes
BF16_BY_AMX = 3
HEAD, GROUP = 8 * PANEL, 64  # int8: bytes before a panel; its inputs are padded to a multiple of GROUP


def pass_args(inputs: Tensor, positions: Tensor, places: Tensor, mask: Tensor, cache: Tensor, **made: Any) -> Any:
    """Return the arguments of a pass; `cache` are the keys and values of all layers, `made` what it writes."""
    inputs, positions, places = inputs.float().contiguous(), positions.contiguous(), places.contiguous()
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return cpp.PassArgs(
        **{"rows": inputs.shape[0], "nodes": inputs.shape[1], "slots": cache.shape[-2]},
        threads=torch.get_num_threads(),
        **{"inputs": inputs, "positions": positions, "places": places, "mask": mask},
        **{"mask_row": mask.stride(0), "mask_node": mask.stride(1), "cache": cache, "plane": cache.stride(0), **made},
    )


class Arena:
    """Memory for copies of tensors, in huge pages if the system has them, which saves address translations."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have no huge pages
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0

    @classmethod
    def for_module(cls, module: nn.Module) -> "Arena":
        """Return an arena for all weights of a module; those that are not packed are in fp32."""
        return cls(sum(LINE + max(p.element_size(), 4) * p.numel() for p in module.parameters()))

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        begun, count = -(-self._used // LINE) * LINE, tensor.numel() * tensor.element_size()
        self._used = begun + count
        place = self.memory[begun : self._used].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor.detach())

    def wide(self, tensor: Tensor) -> Tensor:
        """Return a copy in fp32."""
        return self.keep(tensor.float())

    def panels(self, weight: Float[Tensor, "n k"], order: Int[Tensor, " n"] | None = None) -> Tensor:
        """Return a weight as panels of 32 outputs with all inputs: in bf16 in groups of two, in int8 of four.

        `order` permutes the outputs. In int8 inputs are padded with zeros, and a panel starts with 32 scales and the
        sums of the 32 outputs' weights.
        """
        numbers, scales = (weight.qdata, weight.scale) if isinstance(weight, Int8Weight) else (weight.data, None)  # type: ignore[attr-defined]
        if order is not None:
            numbers, scales = numbers[order], None if scales is None else scales[order]
        if scales is None and weight.dtype == torch.float32:
            return self.keep(numbers.unflatten(0, (-1, PANEL)).transpose(1, 2))
        if scales is None:
            return self.keep(numbers.unflatten(1, (-1, 2)).unflatten(0, (-1, PANEL)).transpose(1, 2))
        numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % GROUP))
        fours = numbers.unflatten(1, (-1, 4)).unflatten(0, (-1, PANEL)).transpose(1, 2)
        sums = numbers.sum(1, dtype=torch.int32)
        parts = (scales.float().view(-1, PANEL), sums.view(-1, PANEL), fours.flatten(1))
        return self.keep(torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1))


def kind_of(*panels: Tensor, amx: bool = True) -> int:
    """Return the kind of packed weights, those in bf16 by AMX or not; ValueError if there are several."""
    kinds = {KINDS[tensor.dtype] for tensor in panels}
    if len(kinds) > 1:
        raise ValueError("the cpu engine reads all weights in 8 bits or none, this model has both: quantize all")
    kind = kinds.pop()
    return BF16_BY_AMX if amx and kind == KINDS[torch.bfloat16] else kind


class PackedLayer(NamedTuple):
    """The packed weights of a decoder layer, fields of `Layer` in pass.cpp; norms that it lacks are None."""

    attention_norm: Tensor | None
    ffn_norm: Tensor
    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor

    @classmethod
    def of(cls, block: Any, arena: Arena) -> "PackedLayer":
        """Pack a `Block` or an `EagleLayer`."""
        attention, feed = block.attention, block.feed_forward
        interleaved = torch.arange(feed.w13.out_features).unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten()
        return cls(
            arena.wide(block.attention_norm.weight) if isinstance(block.attention_norm, RMSNorm) else None,
            arena.wide(block.ffn_norm.weight),
            arena.panels(attention.wqkv.weight),
            arena.panels(attention.wo.weight),
            arena.panels(feed.w13.weight, interleaved),
            arena.panels(feed.w2.weight),
        )


def model_args(
    layers: Sequence[PackedLayer], dim: int, heads: int, eps: float, rope: Tensor, *, amx: bool = True, **more: Any
) -> Any:
    """Return a model of packed layers, with the norm and the head in `more`, or without; ValueError as of `kind_of`."""
    linears = [panels for layer in layers for panels in (layer.wqkv, layer.wo, layer.w13, layer.w2)]
    kind = kind_of(*linears, more.get("head", linears[0]), amx=amx)
    sizes = {"dim": dim, "heads": heads, "layers": len(layers), "hidden": len(layers[0].w13) * PANEL // 2}
    own = array([cpp.Layer(**layer._asdict()) for layer in layers])
    return cpp.Model(**sizes, kind=kind, eps=eps, layer=own, rope=rope, **more)


def check_weights(module: nn.Module) -> None:
    """Raise ValueError for weights that `pass.cpp` cannot read."""
    weight = next(module.parameters())
    if weight.device.type != "cpu":
        raise ValueError(f"the cpu engine is for CPUs, the model is on {weight.device.type}: use another engine")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the cpu engine computes in fp32 or bf16, the model is in {weight.dtype}: choose one of them")
    weights = [linear.weight for linear in submodules(module) if isinstance(linear, nn.Linear)]
    if any(is_quantized(weight) and not isinstance(weight, Int8Weight) for weight in weights):
        raise ValueError(
            "the cpu engine reads weights in full or in int8, these are quantized otherwise: use --engine eager or "
            "--weights int8"
        )


def linear(
    x: Float[Tensor, "*b k"], panels: Tensor, bias: Float[Tensor, " n"] | None, outputs: int, *, amx: bool = True
) -> Float[Tensor, "*b n"]:
    """Return x times a packed weight plus an fp32 bias, in fp32; in bf16 by `amx`, if the processor has it.

    Inputs are rounded to bf16 for a bf16 weight, and to 8-bit integers, one scale per row, for an int8 weight.
    """
    inputs = x.shape[-1]
    panel = HEAD + PANEL * (inputs + -inputs % GROUP) if panels.dtype == torch.uint8 else PANEL * inputs
    assert (len(panels) * PANEL, panels[0].numel()) == (outputs, panel), "inputs are not as wide as the weight"
    out, a = x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32), x.float().contiguous()
    sizes = {"rows": a[..., 0].numel(), "inputs": inputs, "outputs": outputs, "kind": kind_of(panels, amx=amx)}
    args = cpp.LinearArgs(**sizes, threads=torch.get_num_threads(), a=a, panels=panels, bias=bias, out=out)
    library().lantern_linear(ctypes.byref(args))
    return out


def gumbel(key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, " n"], table: Float32[Tensor, "b p v"]) -> None:
    """Write the noise of `sampling.random_gumbel`."""
    assert table.is_contiguous() and table.dtype == torch.float32
    given = [tensor.contiguous() for tensor in (key.low, key.high, images, positions)]
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, table))
    sizes = (*table.shape, len(positions), torch.get_num_threads())
    library().lantern_gumbel(*map(ctypes.c_int32, sizes), *places)


class PackedPass:
    """A target's packed weights, and the call that runs a pass over them."""

    def __init__(self, target: Any, *, amx: bool) -> None:
        config, self.dtype, self.amx = target.config, target.tok_embeddings.weight.dtype, amx
        check(target)
        self.dim, self.vocab = config.dim, config.vocab_size
        arena = Arena.for_module(target)
        layers = [PackedLayer.of(block, arena) for block in target.layers]
        norm, self.head = arena.wide(target.norm.weight), arena.panels(target.output.weight)
        shape, rope = (config.dim, config.n_head, config.norm_eps), target.rotary.table.clone()
        self.model = model_args(layers, *shape, rope, amx=amx, vocab=config.vocab_size, norm=norm, head=self.head)
        # without a head: what is only read needs no logits
        self.reader = cpp.Model(**self.model.kept | {"head": None})
        self.embedder = target.cls_embedding
        if isinstance(self.embedder, CaptionEmbedder) and config.caption_dim % LANES == 0:
            self.embedder = packed_captions(self.embedder, arena, amx)

    def run(
        self,
        model: Any,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Float[Tensor, "b n s"],
        memory: Float[Tensor, "2l b h s d"],
        slots: Int[Tensor, "b n"],
        taps: tuple[int, ...],
        logits: Float[Tensor, "b n v"] | None = None,
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b n tc"] | None]:
        """Run a pass, and write its logits if they are given; return its features and the inputs of tapped layers."""
        rows, nodes = inputs.shape[:2]
        features = torch.empty(rows, nodes, self.dim, dtype=torch.float32)
        fused = torch.empty(rows, nodes, len(taps) * self.dim, dtype=torch.float32) if taps else None
        made = {"features": features, "logits": logits, "fused": fused, "tapped": torch.tensor(taps, dtype=torch.int32)}
        run = pass_args(inputs, positions, slots, mask, memory, taps=len(taps), **made)
        library().lantern_pass(ctypes.byref(model), ctypes.byref(run))
        return features.to(self.dtype), None if fused is None else fused.to(self.dtype)


_PASSES = {amx: WeightCache(partial(PackedPass, amx=amx)) for amx in (False, True)}


class CpuTarget(PreparedTarget):
    """A target that reads prompts in C++, and scores inputs if its cache is in fp32, otherwise by torch."""

    amx: ClassVar[bool] = True  # whether products in bf16 use it, if the processor has it, in another order
    make_gumbel = staticmethod(gumbel)

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights again if they have changed."""
        self.program = _PASSES[self.amx].get(self.module)
        self.cls_embedding = self.program.embedder

    def forward(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score inputs, as `Target.__call__`."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != torch.float32:
            return self.module(inputs, positions, mask, cache=cache, slots=slots, taps=taps)
        program = self.program
        logits = torch.empty(*inputs.shape[:2], program.vocab, dtype=torch.float32)
        features, tapped = program.run(program.model, inputs, positions, mask, cache.buffer, slots, taps, logits)
        return Scores(logits, features, tapped)

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts one by one, so that they are as independent of each other as passes are."""
        # LlamaGen's reading, with the slots read by `read_slots` of this class
        read = partial(Transformer.read, cast(Any, self), rows=rows, whole=whole, taps=taps)
        return Prompt.joined(list(read_in_passes(read, condition, 1).values()))

    def read_slots(
        self, inputs: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"], *, entered: dict[int, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "l b h d"]]:
        """Read conditioning slots in C++, as `Transformer.read_slots`.

        With their rotary rows, which are zero, attention is the mean of the values that a slot sees.
        """
        (rows, count), program, config = mask.shape, self.program, self.config
        memory = torch.zeros(2 * config.n_layer, rows, config.n_head, count, config.head_dim, dtype=torch.float32)
        where = torch.arange(count).expand(rows, -1)
        # words see the words before them, and padding, which is on the left, sees padding
        seen = torch.ones(count, count, dtype=torch.bool).tril() & (mask[:, None] | ~mask[:, :, None])
        hidden = torch.zeros(rows, count, count, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
        taps = tuple(entered or ())
        features, tapped = program.run(program.reader, inputs, where, hidden, memory, where, taps)
        if entered and tapped is not None:
            entered.update(zip(taps, tapped.chunk(len(taps), -1), strict=True))
        words = mask[:, None, :, None]
        return features, (memory[1::2] * words).sum(3) / words.sum(2).clamp(min=1)

    def features(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
    ) -> Tensor:
        """Return features, as `Target.features`, without the head."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != torch.float32:
            return self.module.features(inputs, positions, mask, cache=cache, slots=slots)
        return self.program.run(self.program.reader, inputs, positions, mask, cache.buffer, slots, ())[0]

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Apply the head in C++."""
        return linear(features, self.program.head, None, self.program.vocab, amx=self.amx)

    def sampler(self, sampling: Sampling, noise: Any) -> Sampler | None:
        """Return the sampler in C++, whose tokens have the noise of `noise.gumbel_table`; None for top-p."""
        if sampling.needs_torch:
            return None
        last = 1 << 30  # interval and top-k are 32-bit integers in C++
        how: dict[str, Any] = {"top_k": min(sampling.top_k, last), "interval": min(sampling.guidance_interval, last)}
        how |= {"guidance": sampling.guidance, "temperature": sampling.temperature}

        def best(
            logits: Float[Tensor, "b r n v"],
            places: Int[Tensor, "b n"],
            *,
            width: int = 1,
            purpose: int = Purpose.TARGET,
            grid: Int[Tensor, "b t"] | None = None,
            total: Float[Tensor, " b"] | None = None,
        ) -> Int[Tensor, "b n k"]:
            images, rows, nodes, vocab = logits.shape
            logits, places, table = logits.float().contiguous(), places.contiguous(), noise.gumbel_table(purpose)
            assert vocab % LANES == 0, f"{vocab} tokens, expected a multiple of {LANES}"
            tokens = 0
            if table is not None:
                assert table.is_contiguous() and table.shape[::2] == (images, vocab), "noise of other images or tokens"
                tokens = table.shape[1]
                places = places.clamp(0, tokens - 1)
            sampled = places.new_empty(images, nodes, width)
            sizes = {"images": images, "rows": rows, "nodes": nodes, "vocab": vocab, "tokens": tokens, "width": width}
            given = {"threads": torch.get_num_threads(), "logits": logits, "places": places, "noise": table}
            library().lantern_sample(ctypes.byref(cpp.SampleArgs(**sizes, **how, **given, sampled=sampled)))
            if grid is not None and total is not None:
                write_tokens(grid, total, logits, places, sampled[..., 0])
            return sampled

        return best


class PortableTarget(CpuTarget):
    """A target whose logits have the same bits on all processors."""

    amx = False


def check(target: Any) -> None:
    """Raise ValueError for a device, dtype, quantization or widths that `pass.cpp` does not support."""
    config = target.config
    if (reason := left_out(target)) is not None:
        raise ValueError(f"the cpu engine reads the weights itself, and {reason}: use --engine eager")
    check_weights(target)
    check_widths(config)


def check_widths(config: TransformerConfig) -> None:
    """Raise ValueError for widths that `pass.cpp` does not support."""
    widths: Sequence[tuple[str, int, int]] = (
        ("dim", config.dim, PANEL),
        ("vocab_size", config.vocab_size, PANEL),
        ("width of a head", config.head_dim, LANES),
        ("width of the feed-forward layer", config.ffn_dim, LANES),
    )
    for name, width, expected in widths:
        if width % expected:
            raise ValueError(
                f"the model's {name} is {width}, the cpu engine needs a multiple of {expected}: use --engine eager"
            )


class PackedLinear(nn.Linear):
    """A linear with packed weights; the result has the dtype of the input."""

    def __init__(self, of: nn.Linear, arena: Arena, *, amx: bool = True) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(of.__dict__)
        self.amx, self.panels = amx, arena.panels(of.weight)
        self.wide_bias = None if of.bias is None else arena.wide(of.bias)

    def forward(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:  # type: ignore[override]
        """Apply the linear."""
        return linear(x, self.panels, self.wide_bias, self.out_features, amx=self.amx).to(x.dtype)


class WideGELU(nn.Module):
    """GELU in its tanh form, computed in fp64, so that its bits do not depend on the processor."""

    def forward(self, x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Apply the function."""
        return nn.functional.gelu(x.double(), approximate="tanh").to(x.dtype)


def packed_captions(embedder: CaptionEmbedder, arena: Arena, amx: bool) -> CaptionEmbedder:
    """Return the embedder of captions with packed linears; one that was given other layers as it is."""
    if [type(part) for part in embedder.cap_proj] != [nn.Linear, nn.GELU, nn.Linear]:
        return embedder
    fc1, gelu, fc2 = cast("Sequence[Any]", embedder.cap_proj)
    if gelu.approximate != "tanh":
        return embedder
    twin = copy.copy(embedder)
    packed = nn.Sequential(PackedLinear(fc1, arena, amx=amx), WideGELU(), PackedLinear(fc2, arena, amx=amx))
    twin._modules = {"cap_proj": packed}
    return twin


class PackedDrafterLayer(DraftLayer):
    """A layer as one call if its cache is in fp32; otherwise the original layer."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values: fp32, whatever the weights are."""
        return torch.float32

    def __init__(self, of: Any, arena: Arena) -> None:
        super().__init__()
        self.__dict__.update(of.__dict__)
        self._original = (of,)  # in a tuple, so that its weights are not registered twice
        self.weights = PackedLayer.of(of, arena)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Run the layer."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != self.cache_dtype:
            return self._original[0](x, factors, mask, cache=cache, slots=slots)
        if mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=torch.float32).masked_fill(~mask, -torch.inf)
        (rows, nodes, dim), weights = x.shape, self.weights
        number, eps = self._original[0].number, self._original[0].ffn_norm.eps
        own = cache.buffer[2 * number : 2 * number + 2]
        assert own.is_contiguous()
        # each node has three rotary factors: of query, key and value
        positions = torch.arange(0, 3 * rows * nodes, 3)
        out = torch.empty(rows, nodes, dim, dtype=torch.float32)
        model = model_args([weights], dim, own.shape[2], eps, factors.contiguous())
        run = pass_args(x, positions, slots[0].expand(rows, -1), mask, own, features=out)
        library().lantern_pass(ctypes.byref(model), ctypes.byref(run))
        return out.to(x.dtype)


Module = TypeVar("Module", bound=nn.Module)


def packed_drafter(module: Module, *, int8: bool = False) -> Module:
    """Return a drafter's module with packed layers; the rest is shared with the given module.

    With `int8` the rest is shared with a copy in 8 bits. The result is cached per module, and made again when its
    weights have changed. Modules of other kinds and widths, and those with another forward, as compiled ones have, are
    returned as they are. ValueError for weights that are not on a CPU, and for dtypes other than fp32 and bf16.
    """
    drafter: Any = module
    if "forward" in vars(module) or not any(isinstance(child, DraftLayer) for child in module.modules()):
        return module  # a copy would run the layers of the original
    config = drafter.config
    if config.dim % PANEL or config.dim // config.n_head % LANES or config.ffn_dim % LANES:
        return module
    drafter = quantized(module, "int8", ("layers", "fc")) if int8 else module
    return cast(Module, _PACKED.get(drafter))


def _packed(module: Any) -> nn.Module:
    check_weights(module)
    arena, twin = Arena.for_module(module), copy.copy(module)
    layers = [PackedDrafterLayer(of, arena) if of.is_packable and not left_out(of) else of for of in module.layers]
    twin._modules = module._modules | {"layers": nn.ModuleList(layers)}
    if isinstance(fc := twin._modules.get("fc"), nn.Linear) and not left_out(fc):
        twin._modules["fc"] = PackedLinear(module.fc, arena)
    return twin


_PACKED: WeightCache[nn.Module] = WeightCache(_packed)
