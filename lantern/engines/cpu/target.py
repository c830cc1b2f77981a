"""Targets and drafters whose layers run in C++ (`pass.cpp`)."""

import copy
import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Prompt, Sampler, Scores
from lantern.core.weights import DraftLayer, PreparedTarget, WeightCache, left_out, quantized, read_in_passes
from lantern.engines.cpu import build
from lantern.engines.cpu.kernels import (
    LANES,
    PANEL,
    Arena,
    LayerArgs,
    ModelArgs,
    PackedLayer,
    PassArgs,
    check_weights,
    kind_of,
    layer,
    linear,
    sampler_of,
    uniforms,
)
from lantern.models.llamagen.transformer import Transformer


class PackedPass:
    """A target's packed weights, and the call that runs a pass over them."""

    def __init__(self, target: Any) -> None:
        config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        check(target)
        self.call = build.library().lantern_pass
        self.dim, self.vocab = config.dim, config.vocab_size
        arena = Arena.for_module(target)
        # the tensors whose addresses pass.cpp holds
        self._layers = [PackedLayer.of(block, arena) for block in target.layers]
        self._norm, self._head = arena.wide(target.norm.weight), arena.panels(target.output.weight)
        self._rope = target.rotary.table.clone()
        layers = (LayerArgs * config.n_layer)(*(layer.addresses for layer in self._layers))
        hidden = target.layers[0].feed_forward.w2.weight.shape[1]
        kind = kind_of(self._head, *(panels for layer in self._layers for panels in layer.linears))
        shape = (config.dim, config.n_head, config.n_layer, hidden, config.vocab_size, kind)
        places = (tensor.data_ptr() for tensor in (self._norm, self._head, self._rope))
        self.model = ModelArgs(*shape, config.norm_eps, layers, *places)
        # conditioning slots need no logits
        self._reader = ModelArgs(*shape, config.norm_eps, layers, self._norm.data_ptr(), None, self._rope.data_ptr())

    def read_slots(
        self, inputs: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"], *, entered: dict[int, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "l b h d"]]:
        """Read conditioning slots, as `Transformer.read_slots`: with their rotary rows, which are zero, attention is
        the mean of the values that a slot sees.
        """
        rows, count = mask.shape
        heads, layers = self.model.heads, self.model.layers
        memory = torch.zeros(2 * layers, rows, heads, count, self.dim // heads, dtype=torch.float32)
        where = torch.arange(count).expand(rows, -1)
        # words see the words before them, and padding, which is on the left, sees padding
        seen = torch.ones(count, count, dtype=torch.bool).tril() & (mask[:, None] | ~mask[:, :, None])
        hidden = torch.zeros(rows, count, count, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
        taps = tuple(entered or ())
        features, fused = self.run(self._reader, inputs, where, hidden, memory, where, taps)
        if entered and fused is not None:
            entered.update(zip(taps, fused.chunk(len(taps), -1), strict=True))
        words = mask[:, None, :, None]
        return features, (memory[1::2] * words).sum(3) / words.sum(2).clamp(min=1)

    def run(
        self,
        model: ModelArgs,
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
        inputs, positions, places = inputs.float().contiguous(), positions.contiguous(), slots.contiguous()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        features = torch.empty(rows, nodes, self.dim, dtype=torch.float32)
        fused = torch.empty(rows, nodes, len(taps) * self.dim, dtype=torch.float32) if taps else None
        tapped = (ctypes.c_int32 * len(taps))(*taps)
        run = PassArgs.of((inputs, positions, places, mask), memory, (fused, features, logits), tapped)
        self.call(ctypes.byref(model), ctypes.byref(run))
        return features.to(self.dtype), None if fused is None else fused.to(self.dtype)

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Apply the head, as `Transformer.head`."""
        return linear(features, self._head, None, self.vocab)


_PASSES = WeightCache(PackedPass)


class CpuTarget(PreparedTarget):
    """A target that reads prompts in C++, and scores inputs if its cache is in fp32, otherwise by torch."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.cls_embedding = module.cls_embedding
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
    ) -> Scores:
        """Score inputs, as `Target.__call__`."""
        if mask is None or slots is None or cache is None or cache.buffer.dtype != torch.float32:
            return self.module(inputs, positions, mask, cache=cache, slots=slots, taps=taps)
        program = self.program
        logits = torch.empty(*inputs.shape[:2], program.vocab, dtype=torch.float32)
        features, fused = program.run(program.model, inputs, positions, mask, cache.buffer, slots, taps, logits)
        return Scores(logits, features, fused)

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts one by one, so that they are as independent of each other as passes are."""
        # LlamaGen's reading, with the slots read by `read_slots` of this class
        read = partial(Transformer.read, cast(Any, self), rows=rows, whole=whole, taps=taps)
        return Prompt.joined(list(read_in_passes(read, condition, 1).values()))

    def read_slots(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Read conditioning slots, as `Transformer.read_slots`, in C++."""
        return self.program.read_slots(*args, **kwargs)

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
    if (reason := left_out(target)) is not None:
        raise ValueError(f"the cpu engine reads the weights itself, and {reason}: use --engine eager")
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


class PackedLinear(nn.Linear):
    """A linear with packed weights; the result has the dtype of the input."""

    def __init__(self, of: nn.Linear, arena: Arena) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(of.__dict__)
        self._panels = arena.panels(of.weight)
        self._wide_bias = None if of.bias is None else arena.wide(of.bias)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The packed weight, and the bias in fp32."""
        return self._panels, self._wide_bias

    def forward(self, x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n"]:  # type: ignore[override]
        """Apply the linear."""
        return linear(x, self._panels, self._wide_bias, self.out_features).to(x.dtype)


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
        number, eps = self._original[0].number, self._original[0].ffn_norm.eps
        own = cache.buffer[2 * number : 2 * number + 2]
        return layer(x, factors, mask, own, slots[0], self.weights, eps).to(x.dtype)


Module = TypeVar("Module", bound=nn.Module)


def packed_drafter(module: Module, *, int8: bool = False) -> Module:
    """Return a drafter's module with packed layers; the rest is shared with the given module.

    With `int8` the rest is shared with a copy in 8 bits. The result is cached per module, and made again when its
    weights have changed. Modules of other kinds and widths are returned as they are. ValueError for weights that are
    not on a CPU, and for dtypes other than fp32 and bf16.
    """
    drafter: Any = module
    if not any(isinstance(child, DraftLayer) for child in module.modules()):
        return module
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
