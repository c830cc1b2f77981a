"""Graphs on a CPU: a capture records every operation of torch, a replay runs them again on the same memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lantern.core.types import Step
from lantern.decoding.loop import State
from lantern.decoding.rounds import Rounds
from lantern.engines.cuda.graphs import Captured, GraphRounds
from lantern.engines.engine import EagerEngine
from tests.engines.cuda.claimed import Claimed, ClaimedDevice


class Outside:
    """A tensor in memory that a recording did not make. As a CUDA graph, it does not keep that memory alive.

    The memory of claimed tensors is that of the tensors on the CPU that they hold.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self.is_claimed = isinstance(tensor, Claimed)

    def tensor(self) -> Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, f"a replay reads memory that was freed: {self.form}"
        dtype, *place = self.form
        made = torch.empty(0, dtype=dtype).set_(memory, *place)
        return Claimed(made) if self.is_claimed else made


class Recording(TorchDispatchMode):
    """Records operations with their tensors. As a CUDA graph, it knows memory and no names of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.own = {0}  # addresses of what the operations made

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name != "_local_scalar_dense", "a captured round must not read a value on the host"
        known = {address(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        given = tree_map(self.noted, (args, kwargs or {}))
        made = function(*args, **(kwargs or {}))
        fresh = [x if isinstance(x, Tensor) and address(x) not in known else None for x in tree_flatten(made)[0]]
        self.own |= {address(x) for x in fresh if x is not None}
        self.operations.append((function, *given, fresh))
        return made

    def noted(self, value: Any) -> Any:
        """Return an argument as it is kept; numbers, and tensors of other classes, stay as they are."""
        is_plain = type(value) in (Tensor, torch.nn.Parameter, Claimed) and value.ndim > 0
        return Outside(value) if is_plain and address(value) not in self.own else value

    def replay(self) -> None:
        for function, args, kwargs, fresh in self.operations:
            args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Outside) else x, (args, kwargs))
            again = tree_flatten(function(*args, **kwargs))[0]
            for old, new in zip(fresh, again, strict=True):
                if old is not None:
                    old.copy_(new)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Rehearsed(GraphRounds):
    captured = replayed = 0

    def capture(self) -> tuple[Any, Step]:
        """Record a round; what it wrote in place is put back, since a capture does not run it."""
        type(self).captured += 1
        kept = {id(tensor): (tensor, tensor.clone()) for tensor in memory_of(self.state)}
        with Recording() as recording, torch.no_grad():
            step = self.held_round()
        for tensor, value in kept.values():
            tensor.copy_(value)
        return recording, step

    def held_round(self) -> Step:
        return self.state.round()

    def replay(self, captured: Captured) -> None:
        type(self).replayed += 1
        super().replay(captured)


def watching(device: ClaimedDevice) -> type[Any]:
    """Return a class of rounds that counts its own, and whose `waits` are those of the captured one."""

    class Watched(Rehearsed):
        captured = replayed = 0
        waits: ClassVar[list[str] | None] = None

        def held_round(self) -> Step:
            before = len(device.waits)
            step = super().held_round()
            type(self).waits = device.waits[before:]
            return step

    return Watched


@dataclass(frozen=True)
class RehearsedEngine(EagerEngine):
    """The engine `graph` with recordings for graphs, and passes by torch."""

    rounds: type[GraphRounds] = Rehearsed
    captures: ClassVar[bool] = True

    def drive(self, states: Sequence[State], earlier: Rounds | None = None) -> Rounds:
        (state,) = states
        return self.rounds(state)


def memory_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors that a generation, its drafter and what these hold may write to."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if 0 not in value.stride() and not value.requires_grad:
            yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from memory_of(entry, seen)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from memory_of(entry, seen)
    elif type(value).__module__.startswith("lantern.") and hasattr(value, "__dict__"):
        yield from memory_of(value.__dict__, seen)
