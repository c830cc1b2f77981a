"""The state of a stepper as a graph sees it: the tensors that its steps read, and the values that they are made with.

A captured graph reads and writes fixed memory. Another generation can replay it if its state has the same form: its
tensors are copied to the memory of the graph, which the generation uses from then on.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lantern.decoding.loop import Run, Stepper
from lantern.decoding.prompt import PromptCache
from lantern.engines.prepared import PreparedTarget

Path = tuple[str, ...]
PLAIN = (bool, int, float, str, bytes, type(None), torch.device, torch.dtype)


class State:
    """Every tensor that can be reached from some objects, by its path, and the form of all they hold.

    Attributes, dataclasses, mappings and sequences are followed; of modules only the addresses of the weights count.
    What only the host reads is left out (`Stepper.on_host`, `Run.on_host`). `form` is equal for two states if and only
    if a graph of one may be replayed with the tensors of the other.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        self.tensors: dict[Path, Tensor] = {}
        self._places: dict[Path, Callable[[Tensor], None]] = {}
        self._form: list[tuple[Path, Any]] = []
        self.owned: list[object] = []  # what prepared targets hold: a graph uses its memory
        self._seen: dict[int, Path] = {}
        self._kept: list[object] = []  # what was visited stays alive, so that its id is not given to another object
        for number, holder in enumerate(holders):
            self._visit(holder, (str(number),), None)

    @property
    def form(self) -> tuple[tuple[Path, Any], ...]:
        """Paths with shapes, layouts and values."""
        return tuple(self._form)

    def move_to(self, memory: Mapping[Path, Tensor]) -> None:
        """Copy all tensors to those of a state of the same form, and let the objects hold these instead."""
        moved = set[int]()
        for path, tensor in self.tensors.items():
            other = memory[path]
            if _address(other) != _address(tensor) and _address(other) not in moved:
                moved.add(_address(other))
                _bytes(other).copy_(_bytes(tensor))
        for path, assign in self._places.items():
            assign(memory[path])

    def settle(self) -> None:
        """Let go of the objects that were visited, the target among them: a graph needs their tensors only."""
        self._places, self._seen, self._kept = {}, {}, []

    def _visit(self, value: Any, path: Path, assign: Callable[[Tensor], None] | None) -> None:
        if isinstance(value, PLAIN):
            self._form.append((path, value))
            return
        if id(value) in self._seen:
            self._form.append((path, self._seen[id(value)]))
        else:
            self._seen[id(value)] = path
            self._kept.append(value)
            self._enter(value, path)
        if isinstance(value, Tensor) and assign is not None:
            self.tensors[path], self._places[path] = value, assign

    def _enter(self, value: Any, path: Path) -> None:
        """Follow an object that was not met before."""
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors[path] = value
            size = value.untyped_storage().nbytes()
            layout = (tuple(value.shape), value.stride(), value.storage_offset(), size, value.dtype, value.device)
            self._form.append((path, layout))
        elif isinstance(value, nn.Module):
            self._form.append((path, (kind, tuple(weight.data_ptr() for weight in value.parameters()))))
        elif isinstance(value, PreparedTarget):
            held = {name: entry for name, entry in vars(value).items() if not isinstance(entry, nn.Module)}
            self.owned += held.values()
            same = tuple((name, entry if isinstance(entry, PLAIN) else id(entry)) for name, entry in held.items())
            self._form.append((path, (kind, same, tuple(weight.data_ptr() for weight in value.parameters()))))
        elif isinstance(value, PromptCache):
            self._form.append((path, kind))  # read before the first step only
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._form.append((path, kind))
            for field in dataclasses.fields(value):
                self._visit(getattr(value, field.name), (*path, field.name), None)
        elif isinstance(value, Mapping):
            self._form.append((path, (kind, tuple(map(str, value)))))
            for key in value:
                self._visit(value[key], (*path, str(key)), None)
        elif isinstance(value, list | tuple | set | frozenset):
            self._form.append((path, (kind, len(value))))
            for number, entry in enumerate(value):
                self._visit(entry, (*path, str(number)), None)
        elif kind.__module__.startswith(("lantern.", "tests.")) and not isinstance(value, type):
            self._form.append((path, kind))
            on_host = value.on_host if isinstance(value, Stepper | Run) else ()
            for name in sorted(vars(value).keys() - set(on_host)):
                self._visit(vars(value)[name], (*path, name), partial(setattr, value, name))
        else:  # functions, generators and the like: what they capture is reached by other paths
            self._form.append((path, kind))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the whole memory that a tensor is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
