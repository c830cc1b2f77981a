"""Weights in 8 or 4 bits; changes of weights, and what engines make of them; memory, device and modes of torch.

Quantized weights are an option of loading, for the linears of LlamaGen's layers and, in 8 bits, its head. Decoding is
exact with respect to the quantized target. In 4 bits, by torchao, integers are in groups of 32 with one scale each. On
a GPU (bf16) torchao's packed kernels read a quarter of the bytes; on a CPU weights are unpacked in every pass, which
saves memory and no time. In 8 bits there is one scale per output; the cpu engine reads the integers as they are, and
rounds the inputs of its products to 8 bits too. They are those of torchao, whose import takes seconds and 160 MiB.
Embeddings, norms and the caption projection are unchanged.
"""

import copy
import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils.parametrize import is_parametrized

from lantern.core.config import WEIGHTS, Weights, install_hint
from lantern.core.io import trim_memory
from lantern.core.types import Condition, Prompt, Scores, Target

PARTS: dict[Weights, tuple[str, ...]] = {"full": (), "int8": ("layers", "output"), "int4": ("layers",)}
GROUP = 32
ROWS = 1024  # outputs that are quantized to 8 bits at once, since what is computed meanwhile is in fp32
BY_ROW = (Tensor.__getitem__, Tensor.clone, Tensor.contiguous, Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]


class Int8Weight(Tensor):
    """The weight of a linear in 8-bit integers `qdata` with one `scale` per output, symmetric: qdata * scale.

    `dtype` is that of its products. It can be moved, copied and indexed by row. What loading needs is in
    `__torch_function__`, since torch imports sympy for the first `__torch_dispatch__`: 40 MiB.
    """

    qdata: Int8[Tensor, "n k"]
    scale: Float[Tensor, "n 1"]

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> "Int8Weight":
        """Return a tensor of this shape and dtype without memory of its own."""
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Float[Tensor, "n k"]) -> Self:
        """Quantize a weight: the largest value of a row becomes 127 or -128."""
        largest = torch.maximum(weight.amax(1, keepdim=True), -weight.amin(1, keepdim=True))
        scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()
        qdata = torch.empty_like(weight, dtype=torch.int8)
        for rows, factors, out in zip(weight.split(ROWS), (1 / scale).split(ROWS), qdata.split(ROWS), strict=True):
            out.copy_((rows * factors).round_().clamp_(-128, 127))
        return cls(qdata, scale, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and scales."""
        return self.qdata.nbytes + self.scale.nbytes

    def __repr__(self, **_: Any) -> str:
        return f"Int8Weight({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = made = cast(Self, nn.Parameter(self.clone(), requires_grad=False))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func not in BY_ROW:
            return super().__torch_function__(func, types, args, kwargs or {})
        weight, *more = args
        return cls(func(weight.qdata, *more), func(weight.scale, *more), weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._to_copy.default:
            raise NotImplementedError(f"{func} is not defined for weights in 8 bits")
        (weight,), how = args, dict(kwargs)
        dtype = how.pop("dtype", None) or weight.dtype
        return cls(func(weight.qdata, **how), func(weight.scale, **how), dtype)


def _linear(x: Float[Tensor, "*b k"], weight: Int8Weight, bias: Tensor | None = None) -> Float[Tensor, "*b n"]:
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.qdata.T.to(x.dtype))
    out = (out * weight.scale.to(out.dtype).flatten()).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def check_kind(weights: str) -> None:
    """Raise ValueError for an unknown kind of weights, ImportError where torchao is needed and not installed."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}, expected one of {', '.join(WEIGHTS)}")
    if weights == "int4" and find_spec("torchao") is None:
        raise ImportError(f"int4 weights need torchao, which is not installed; {install_hint('quantized')}")


def weights_kind(module: nn.Module) -> Weights:
    """Return the kind of a module's weights, that of the first quantized one."""
    found = next(filter(is_quantized, module.parameters()), None)
    return "full" if found is None else "int8" if isinstance(found, Int8Weight) else "int4"


def quantize(name: str, part: nn.Module, weights: Weights) -> None:
    """Quantize the linears of a part of a target in place; of parts that `weights` leaves full, none.

    ValueError for widths that are not multiples of a group (int4), and for parametrized and quantized weights.
    """
    linears = {inner: module for inner, module in part.named_modules(prefix=name) if isinstance(module, nn.Linear)}
    if (inner := next((inner for inner, linear in linears.items() if is_parametrized(linear)), None)) is not None:
        raise ValueError(
            f"the weight of {inner} is parametrized, so it is not quantized: merge it by remove_parametrizations, or "
            "use weights in full"
        )
    if (inner := next((inner for inner, linear in linears.items() if is_quantized(linear.weight)), None)) is not None:
        raise ValueError(f"the weight of {inner} is quantized already, {weights} was given: use weights in full")
    if weights == "int8":
        for linear in linears.values():
            linear.weight = nn.Parameter(Int8Weight.of(linear.weight), requires_grad=False)
        return
    for inner, linear in linears.items():
        if linear.in_features % GROUP:  # which torchao would silently skip
            raise ValueError(
                f"{inner} has {linear.in_features} inputs, expected a multiple of {GROUP} for 4-bit weights"
            )
    with _quiet():
        from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        weight = next(part.parameters())
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            config: Any = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")  # type: ignore[arg-type]
        else:
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
        for linear in linears.values():
            quantize_(linear, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
            trim_memory()  # torchao takes many times the memory of a linear, for a moment


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is of a subclass of Tensor, as `Int8Weight` and torchao's are."""
    return weight.data.__class__ is not Tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of torchao: its import logs which of its kernels this machine cannot use."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


P = ParamSpec("P")
T = TypeVar("T")
SAMPLED = 16  # bytes of a tensor, spread over it
KNOWN_LIBRARIES = {"lantern", "torch", "torchao", "transformers"}  # whose modules engines know


class WeakRefs(list["ref[Tensor]"]):
    """References that are kept so that the ids beside them in `weights_of` stay taken.

    Those ids are compared, so all lists are equal; copies are empty.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakRefs)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakRefs, ()


def submodules(module: nn.Module) -> list[nn.Module]:
    """Return a module and all below it; `modules()`, which makes names, takes several times as long."""
    found = [module]
    for one in found:  # its own are appended meanwhile
        if one._modules:
            found += [child for child in one._modules.values() if child is not None]
    return found


def weights_of(module: Any) -> tuple[Any, ...]:
    """Return a value that changes whenever a weight does, a dtype or device, or a submodule, and that equals no other
    if any of them `is_foreign`, whose results may change without its weights.

    Another tensor counts as a change where it has the memory of one that is gone. It is computed several times for
    every image, and `module.parameters()`, which wrappers of modules have to do with, takes more than twice as long;
    weights of a subclass of Tensor take eight times as long if it is asked.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found, modules, tensors = list[Any](), list[nn.Module](), list[Tensor]()
        if isinstance(module, nn.Module):
            modules = submodules(module)
        else:
            tensors += module.parameters()
        for one in modules:
            tensors += [p for p in one._parameters.values() if p is not None]
            if one._buffers:
                kept = one._buffers.keys() - one._non_persistent_buffers_set
                tensors += [b for name, b in one._buffers.items() if b is not None and name in kept]
            found.append(object() if is_foreign(one) else type(one))
        refs = WeakRefs(map(ref, tensors))  # as long as they are held, no other tensor has such a reference
        return (*map(_state_of, tensors), *map(id, refs), *found, refs)


def _state_of(parameter: Tensor) -> tuple[Any, ...]:
    """Return what changes with a tensor: on a CPU with some of its bytes, since fused optimizers, and who writes to
    `data`, as merged adapters are, count no versions. Nor do tensors of inference mode.
    """
    version, place = None if parameter.is_inference() else parameter._version, parameter.data_ptr()
    state = (place, version, parameter.dtype, parameter.device)
    if not place or not parameter.is_cpu or not parameter.is_contiguous():
        return state
    size, storage = parameter.nbytes, parameter.untyped_storage()
    try:
        end = storage.data_ptr() + storage.nbytes()
    except RuntimeError:  # a tensor that several processes share has no memory of its own
        return state
    if place + size > end:  # freed, as in sharded training
        return state
    return *state, (ctypes.c_char * size).from_address(place)[:: size // SAMPLED | 1]


def left_out(module: Any) -> str | None:
    """Return what a pass that reads weights itself would leave out, or None for nothing: a hook, a replaced forward, or
    a module of another library, such as an adapter.
    """
    if not any(map(is_foreign, submodules(module))):
        return None
    for name, one in module.named_modules():
        if is_foreign(one):
            library, name = type(one).__module__.partition(".")[0], name or "the model"
            is_other = library not in KNOWN_LIBRARIES
            return f"{name} is a {type(one).__name__} of {library}" if is_other else f"{name} has a forward hook"
    return None


def is_foreign(one: nn.Module) -> bool:
    """Return whether a module has a hook (or all modules have one) or a replaced forward, or is of another library."""
    own = one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one)
    has_hooks = own or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    return bool(has_hooks) or type(one).__module__.partition(".")[0] not in KNOWN_LIBRARIES


class WeightCache(Generic[T]):
    """What `make` makes from modules: once for each, and again when its weights have changed.

    `make` must not keep a reference to the module, or the module would never be freed.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[nn.Module, tuple[Any, T]] = WeakKeyDictionary()

    def get(self, module: nn.Module) -> T:
        """Return what belongs to a module's present weights."""
        weights = weights_of(module)
        of, made = self._made.get(module, (None, None))
        if of != weights or made is None:
            made = self._make(module)
            self._made[module] = weights, made
        return made


class DraftLayer(nn.Module):
    """Base class of the decoder layers of drafters; the C++ engine packs those that are `is_packable`."""

    is_packable = False

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return next(self.parameters()).dtype


class PreparedTarget(Target):
    """A target whose passes an engine runs; everything else is that of the original `module`.

    Subclasses define `forward`, and `refresh` if they keep something that was made from the weights.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.config = module.config
        self.tok_embeddings, self.output = module.tok_embeddings, module.output

    def __call__(self, *args: Any, **kwargs: Any) -> Scores:
        """Score inputs, as `Target.__call__`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Scores:
        """Score inputs, as `Target.__call__`."""
        return self.module(*args, **kwargs)

    @property
    def training(self) -> bool:
        """Whether dropout is on."""
        return self.module.training

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return features, as `Target.features`."""
        return self.module.features(*args, **kwargs)

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts, as `Target.read`."""
        return self.module.read(condition, rows, whole=whole, taps=taps)

    def parameters(self) -> Iterator[Tensor]:
        """Return the weights."""
        return self.module.parameters()

    def head(self, features: Tensor) -> Tensor:
        """Apply the head, as `Target.head`."""
        return self.module.head(features)


class FixedPasses(PreparedTarget):
    """A target with newlines whose passes have one size for n nodes: each has a newline, so the host counts none.

    Twice as many tokens are computed as there are nodes, while the weights, for which small passes wait, are read once.
    A window needs fewer newlines, but of a tree all nodes of a depth may end a row.
    """

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Scores:
        """Score inputs, as `Target.__call__`."""
        return self.module(inputs, *args, newlines=inputs.shape[1], **kwargs)


def read_in_passes(
    read: Callable[[Condition], Prompt], condition: Condition, size: int, images: Sequence[int] | None = None
) -> dict[int, Prompt]:
    """Read prompts, or those of some `images`, in passes of `size` images, filled up with the last one.

    The bits of a prompt then do not depend on the others.
    """
    images = list(range(condition.batch)) if images is None else list(images)
    found = dict[int, Prompt]()
    for first in range(0, len(images), size):
        some = images[first : first + size]
        together = read(condition.select([*some, *some[-1:] * (size - len(some))]))
        found |= {image: together.at(i) for i, image in enumerate(some)}
    return found


def original(target: Target) -> Any:
    """Return the module that a target was prepared from; other targets are returned as they are."""
    return target.module if isinstance(target, PreparedTarget) else target


def quantized(target: nn.Module, weights: Weights = "int4", parts: tuple[str, ...] | None = None) -> nn.Module:
    """Return a copy of a target, or of a drafter, in which the linears of `parts` have quantized weights.

    It is the same copy as long as the weights of a module do not change, and the module itself if they are of this kind
    already. ValueError for widths that are not multiples of a group (int4), ImportError where torchao is not installed.
    """
    if weights in ("full", weights_kind(target)):
        return target
    check_kind(weights)
    return _copies(weights, PARTS[weights] if parts is None else parts).get(target)


@cache
def _copies(weights: Weights, parts: tuple[str, ...]) -> WeightCache[nn.Module]:
    def quantized_copy(module: nn.Module) -> nn.Module:
        made = copy.deepcopy(module).requires_grad_(False)
        for name, part in made.named_children():
            if name in parts:
                quantize(name, part, weights)
        return made

    return WeightCache(quantized_copy)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels and graphs, which take the current GPU, run on a target's `device`."""
    is_gpu = device.type == "cuda" and device.index is not None and torch.cuda.is_available()
    return torch.cuda.device(device) if is_gpu else nullcontext()


def outside_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run as outside of `torch.autocast`, which would change tokens and what the C++ engine reads, and
    with the CPU as the default device.
    """

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with device, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **named)

    return run
