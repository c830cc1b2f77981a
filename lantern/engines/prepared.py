"""What engines make from weights, and cache: prepared targets, and targets with 4-bit or 8-bit weights.

Decoding is exact with respect to the quantized target. Only weights are quantized, by torchao. In 4 bits the linears of
the layers hold integers in groups of 32 with one scale each. On a GPU (bf16) torchao's packed kernels read a quarter of
the bytes; on a CPU weights are unpacked in every pass, which saves memory and no time. In 8 bits the linears of the
layers and the head hold integers with one scale per output, which the cpu engine reads as they are. Embeddings, norms
and the caption projection are unchanged, and so is the head in 4 bits.
"""

import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lantern.core.config import install_hint
from lantern.core.types import Condition, Prompt, Scores, Target, TargetDefaults

T = TypeVar("T")
GROUP = 32


def weights_of(module: Any) -> tuple[Any, ...]:
    """Return a value that changes whenever a weight does, or its dtype or device, or a submodule is replaced.

    It is computed several times for every image, and `module.parameters()`, which wrappers of modules have to do
    with, takes more than twice as long.
    """
    if not isinstance(module, nn.Module):
        return tuple(map(_state_of, module.parameters()))
    found, modules = list[Any](), [module]
    for one in modules:  # its submodules are appended meanwhile
        if one._modules:
            modules += [child for child in one._modules.values() if child is not None]
        found += [_state_of(p) for p in one._parameters.values() if p is not None]
    return tuple(found)


def _state_of(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.data_ptr(), parameter._version, parameter.dtype, parameter.device


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


class PreparedTarget(TargetDefaults):
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


def original(target: "Target | PreparedTarget") -> Any:
    """Return the module that a target was prepared from; other targets are returned as they are."""
    return target.module if isinstance(target, PreparedTarget) else target


def quantized(target: nn.Module, bits: int = 4, parts: Collection[str] = ("layers", "output")) -> nn.Module:
    """Return a copy of a target, or of a drafter, with weights in 4 or 8 `bits`; in 8, only those of some `parts`.

    A module that is quantized so already is returned as it is. Copies are cached per module, and made again when its
    weights have changed. The copy shares nothing with the original. ValueError for widths that are not multiples of a
    group (4 bits), ImportError where torchao is not installed.
    """
    if bits_of(target) == bits:
        return target
    return _copies(bits, tuple(parts)).get(target)


def bits_of(module: nn.Module) -> int | None:
    """Return the bits of a module's quantized weights, None for others."""
    return vars(module).get("_bits")


def check_widths(target: nn.Module) -> None:
    """Raise ValueError for linears whose inputs are no multiple of a group, which torchao would silently skip."""
    for name, module in target.get_submodule("layers").named_modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP:
            raise ValueError(
                f"layers.{name} has {module.in_features} inputs, expected a multiple of {GROUP} for 4-bit weights"
            )


@cache
def _copies(bits: int, parts: tuple[str, ...]) -> WeightCache[nn.Module]:
    def make(target: nn.Module) -> nn.Module:
        if find_spec("torchao") is None:
            raise ImportError(f"{bits}-bit weights need torchao, which is not installed; {install_hint('quantized')}")
        if bits == 4:
            check_widths(target)
        made = copy.deepcopy(target).requires_grad_(False)
        if bits == 4:
            _quantize_4(made.get_submodule("layers"))
        else:
            _quantize_8(made, parts)
        vars(made)["_bits"] = bits
        return made

    return WeightCache(make)


def _quantize_8(module: nn.Module, parts: Collection[str]) -> None:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        def is_meant(linear: nn.Module, name: str) -> bool:
            return isinstance(linear, nn.Linear) and name.split(".")[0] in parts

        quantize_(module, Int8WeightOnlyConfig(), filter_fn=is_meant)


def _quantize_4(layers: nn.Module) -> None:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        weight = next(layers.parameters())
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")  # type: ignore[arg-type]
        else:
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
        quantize_(layers, config)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Suppress warnings: importing torchao logs which of its kernels this machine cannot use."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels and graphs, which take the current GPU, run on a target's `device`."""
    is_gpu = device.type == "cuda" and device.index is not None and torch.cuda.is_available()
    return torch.cuda.device(device) if is_gpu else nullcontext()


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is of a subclass of Tensor, as torchao's are."""
    return weight.data.__class__ is not Tensor


def has_eight_bits(weight: Tensor) -> bool:
    """Return whether a weight is torchao's int8 with one scale per output."""
    torchao: Any = sys.modules.get("torchao.quantization")  # without the import there is no such weight
    kind = () if torchao is None else torchao.Int8Tensor
    return isinstance(weight, kind) and getattr(weight, "scale").numel() == len(weight)  # noqa: B009 - of torchao's
