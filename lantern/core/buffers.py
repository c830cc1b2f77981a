"""Tensors that the steps of a generation replace, in fixed memory."""

from typing import Any

from torch import Tensor


class Buffers:
    """Attributes in fixed memory: a tensor that is assigned is copied to the buffer of its name, shape and dtype.

    A step therefore finds its state where the last one left it, so that a CUDA graph can replay steps; a later
    generation of the same sizes uses the same memory. A tuple of tensors has one buffer per entry.
    """

    def __init__(self) -> None:
        self.__dict__["_memory"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            self.__dict__[name] = tuple(self._hold(f"{name}.{i}", entry) for i, entry in enumerate(value))
        else:
            self.__dict__[name] = self._hold(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nothing was assigned to {name} yet")

    def _hold(self, name: str, value: Tensor) -> Tensor:
        key = (name, value.shape, value.dtype, value.device)
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = value.clone()
        elif memory is not value:
            memory.copy_(value)
        return memory
