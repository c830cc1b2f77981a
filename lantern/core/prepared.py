"""What engines make from weights, and cache: prepared targets and quantized copies."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lantern.core.types import Condition, Prompt, Scores, Target
from lantern.core.weights import PARTS, Weights, check_kind, kind_of, marked, quantize

T = TypeVar("T")
KNOWN = {"lantern", "torch", "torchao", "transformers"}  # libraries whose modules engines know

# torch raises RuntimeError for all of these, so only the text identifies them
SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")


def weights_of(module: Any) -> tuple[Any, ...]:
    """Return a value that changes whenever a weight, a forward or its hooks do, a dtype or device, or a submodule.

    It is computed several times for every image, and `module.parameters()`, which wrappers of modules have to do
    with, takes more than twice as long; weights of a subclass of Tensor take eight times as long if it is asked.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(module, nn.Module):
            return tuple(map(_state_of, module.parameters()))
        found, modules = list[Any](), [module]
        for one in modules:  # its submodules are appended meanwhile
            if one._modules:
                modules += [child for child in one._modules.values() if child is not None]
            found += [_state_of(p) for p in one._parameters.values() if p is not None]
            found += [*one._forward_hooks, *one._forward_pre_hooks]
            found += [type(one), id(vars(one).get("forward"))]  # not the forward itself, which may hold its module
        return tuple(found)


def _state_of(parameter: Tensor) -> tuple[Any, ...]:
    version = None if parameter.is_inference() else parameter._version  # tensors of inference mode count no versions
    return parameter.data_ptr(), version, parameter.dtype, parameter.device


def left_out(module: Any) -> str | None:
    """Return what a pass that reads weights itself would leave out, or None for nothing: a hook, a replaced forward, or
    a module of another library, such as an adapter.
    """
    for name, one in module.named_modules():
        if one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one):
            return f"{name or 'the model'} has a forward hook"
        if (library := type(one).__module__.partition(".")[0]) not in KNOWN:
            return f"{name or 'the model'} is a {type(one).__name__} of {library}"
    return None


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
    if weights in ("full", kind_of(target)):
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
        return marked(made, weights)

    return WeightCache(quantized_copy)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory ran out: Python's, a GPU's, or that of torch's CPU allocator.

    On Linux a process that overcommits may be killed instead; then there is no error to catch.
    """
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in SIGNS)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels and graphs, which take the current GPU, run on a target's `device`."""
    is_gpu = device.type == "cuda" and device.index is not None and torch.cuda.is_available()
    return torch.cuda.device(device) if is_gpu else nullcontext()
