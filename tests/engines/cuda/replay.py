"""Graphs on a CPU: a capture records every operation of torch, a replay runs them again on the same memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lantern.core.types import Step
from lantern.decoding.loop import State
from lantern.decoding.rounds import Rounds
from lantern.engines.cuda.graphs import Captured, GraphRounds
from lantern.engines.engine import EagerEngine


class Recording(TorchDispatchMode):
    """Records operations with their tensors. As a CUDA graph, it knows memory and no names of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name != "_local_scalar_dense", "a captured round must not read a value on the host"
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, tree_flatten(made)[0]))
        return made

    def replay(self) -> None:
        """Run all operations again; what they made is overwritten."""
        for function, args, kwargs, made in self.operations:
            given = {id(x) for x in tree_flatten((args, kwargs))[0]}
            memory = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
            again = tree_flatten(function(*args, **kwargs))[0]
            for old, new in zip(made, again, strict=True):
                is_new = isinstance(old, Tensor) and id(old) not in given
                if is_new and old.untyped_storage().data_ptr() not in memory:  # no view
                    old.copy_(new)


class Rehearsed(GraphRounds):
    """Rounds as replays of a recording, where there is no GPU."""

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
        """Run the round that is captured."""
        return self.state.round()

    def replay(self, captured: Captured) -> None:
        type(self).replayed += 1
        super().replay(captured)


@dataclass(frozen=True)
class RehearsedEngine(EagerEngine):
    """The engine `graph` with recordings for graphs, and passes by torch."""

    rounds: type[GraphRounds] = Rehearsed
    may_look: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True

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
