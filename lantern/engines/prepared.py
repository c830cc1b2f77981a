"""Prepared targets, and the cache of what engines make from weights."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lantern.core.types import Scores, Target, TargetDefaults

T = TypeVar("T")


def weights_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes whenever a weight does, or its dtype or device."""
    return tuple((p.device, p.dtype, p.data_ptr(), p._version) for p in module.parameters())


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
        self.tok_embeddings, self.cls_embedding, self.output = (
            module.tok_embeddings,
            module.cls_embedding,
            module.output,
        )

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

    def read_prompt(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Read a prompt, as `Target.read_prompt`."""
        return self.module.read_prompt(*args, **kwargs)

    def parameters(self) -> Iterator[Tensor]:
        """Return the weights."""
        return self.module.parameters()

    def head(self, features: Tensor) -> Tensor:
        """Apply the head, as `Target.head`."""
        return self.module.head(features)


def original(target: "Target | PreparedTarget") -> Any:
    """Return the module that a target was prepared from; other targets are returned as they are."""
    return target.module if isinstance(target, PreparedTarget) else target
