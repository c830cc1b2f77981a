"""Sees every operation for which the host would have to wait for the device, or send it something, on any machine."""

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
SOURCES = tuple(str(ROOT / folder) + "/" for folder in ("lantern", "models", "eval"))
# The size of what these return, or a number that the host reads, is known on the device alone.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique",
    "aten::_unique2",
    "aten::allclose",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
# Indexing by truth values looks for the true ones first.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# On a CPU the first ones copy nothing and reach no operator; the others send numbers from the host.
FUNCTIONS = {"tolist", "numpy", "__array__", "cpu", "__dlpack__", "tensor", "as_tensor", "from_numpy"}


@dataclass(frozen=True)
class Readback:
    """One wait: the operation, and the line of this project from which it came."""

    name: str
    place: str
    line: str


class Readbacks:
    """A context in which waits are noted in `seen`."""

    def __init__(self) -> None:
        self.seen: list[Readback] = []
        self._modes = (_Operators(self.seen), _Functions(self.seen))

    def __enter__(self) -> "Readbacks":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


class _Operators(TorchDispatchMode):
    def __init__(self, seen: list[Readback]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        has_truths = name in INDEXING and any(entry is not None and entry.dtype == torch.bool for entry in args[1])
        has_sizes = name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in WAITING or has_truths or has_sizes:
            self._seen.append(noted(name))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, seen: list[Readback]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in FUNCTIONS:
            self._seen.append(noted(func.__name__))
        return func(*args, **(kwargs or {}))


def noted(name: str) -> Readback:
    """The operation with the innermost line of this project."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    if frame is None:
        return Readback(name, "", "")
    path, number = frame.f_code.co_filename, frame.f_lineno
    return Readback(name, f"{Path(path).name}:{number}", linecache.getline(path, number).strip())
