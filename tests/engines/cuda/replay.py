"""Graphs on a CPU: a capture records every operation of torch, a replay runs them again on the same memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lantern.engines.cuda.graphs import Captured, GraphedStepper
from lantern.engines.cuda.state import State


class Recording(TorchDispatchMode):
    """Records operations with their tensors. As a CUDA graph, it knows memory and no names of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name != "_local_scalar_dense", "a captured step must not read a value on the host"
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


class Rehearsed(GraphedStepper):
    """Steps as replays of a recording, where there is no GPU."""

    joined = captured = 0

    def join(self) -> Captured | None:
        found = super().join()
        type(self).joined += found is not None
        return found

    def capture(self) -> Captured:
        """Record a step; the state is put back, since a capture does not run it."""
        type(self).captured += 1
        recording, state = Recording(), State(self.state_holders)
        kept = {path: tensor.clone() for path, tensor in state.tensors.items()}
        with recording, torch.no_grad():
            step = self.held_work()
        for path, tensor in state.tensors.items():
            if 0 not in tensor.stride():
                tensor.copy_(kept[path])
        return self.keep(recording, step, state)
