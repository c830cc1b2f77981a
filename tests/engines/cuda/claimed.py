"""A CUDA device that only claims to be one: tensors compute on the CPU, and the rules of a device are checked.

`ClaimedDevice` is a mode in which `device="cuda"` works without a GPU. A tensor there says that it is on `cuda:0`, has
its numbers in memory of the CPU, and is refused wherever torch would refuse it: beside a tensor of the CPU in the same
operation. Whatever a GPU would have to wait for, or could not capture in a graph, is recorded.
"""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[3]
SOURCES = tuple(f"{ROOT / folder}/" for folder in ("lantern", "models", "eval"))
# results of these have a size or a value that the host reads
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive")
WAITS += ("equal", "allclose", "bincount")


class Claimed(Tensor):
    """A tensor that says it is on a CUDA device, and holds its numbers in `held`, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Claimed":
        form: Any = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        form |= {"dtype": held.dtype, "layout": held.layout}
        made = Tensor._make_wrapper_subclass(cls, held.size(), device=CUDA, **form)
        made.held = held
        return made

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran outside of the mode ClaimedDevice")


def held(value: Any) -> Any:
    """Return the value with the memory of the CPU in place of claimed tensors, in containers too."""
    return tree_map(lambda x: x.held if isinstance(x, Claimed) else x, value)


def claim_module(module: nn.Module) -> Any:
    """Move a module's weights and buffers to the claimed device, and return it."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Claimed(weight.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Claimed(buffer)
    return module


class ClaimedDevice(TorchDispatchMode):
    """While active, a CUDA device is claimed. `waits` names what a GPU would make the host wait for, and the line."""

    allowed_on_cpu: ClassVar[tuple[str, ...]] = ("copy_", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        # makes torch not look for a driver when `device="cuda"` is given
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, where there is no driver
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        tensors: list[Tensor] = []
        tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
        claimed = any(isinstance(x, Claimed) for x in tensors)
        given = kwargs.get("device")
        target = claimed if given is None else torch.device(given).type == "cuda"
        if claimed or (target and name in self.allowed_on_cpu):
            self.check(name, tensors, args, kwargs)
        if given is not None and torch.device(given).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        run = lstm_cell if name == "_thnn_fused_lstm_cell" else function
        made = run(*held(args), **held(kwargs))
        return self.rewrapped(function, args, kwargs, made, target)

    def check(self, name: str, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse tensors of the CPU beside claimed ones, except single numbers and copies; record waits."""
        others = [x for x in tensors if not isinstance(x, Claimed)]
        on_cpu = [x for x in others if x.ndim > 0]
        if on_cpu and name not in self.allowed_on_cpu:
            raise RuntimeError(
                f"{name}: a tensor of size {tuple(on_cpu[0].shape)} on the CPU beside one on {CUDA}: "
                "torch refuses this on a GPU, or copies it there in each call"
            )
        is_async = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        is_copy = others and name in self.allowed_on_cpu and not is_async
        goes_home = name == "_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu"
        indices = args[1] if name in ("index", "index_put_", "index_put") else []
        by_mask = any(entry is not None and entry.dtype == torch.bool for entry in indices)
        by_counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITS or is_copy or goes_home or by_mask or by_counts:
            self.waits.append(f"{name}: {line_of_caller()}")

    def rewrapped(self, function: Any, args: Any, kwargs: Any, made: Any, is_claimed: bool) -> Any:
        """Return results as claimed tensors; those that an operation writes to are returned as they were given."""
        written = []
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[number] if number < len(args) else kwargs.get(argument.name))
        flat = [x for x in written if isinstance(x, Tensor)]
        own = {id(x.held) if isinstance(x, Claimed) else id(x): x for x in flat}

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, Claimed):
                return x
            return own.get(id(x), Claimed(x) if is_claimed else x)

        return tree_map(wrap, made)


def line_of_caller() -> str:
    """Return the innermost line of this project that runs, with its place."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    if frame is None:
        return ""
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{number}: {linecache.getline(path, number).strip()}"


def lstm_cell(new: Tensor, old: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a GPU has one operation for and a CPU has not: hidden state, cell and gates of an LSTM."""
    gates = new + old + sum(bias for bias in biases if bias is not None)
    put, keep, change, show = gates.chunk(4, -1)
    after = keep.sigmoid() * cell + put.sigmoid() * change.tanh()
    return show.sigmoid() * after.tanh(), after, gates


class Event:
    """Stands for a CUDA event: everything has happened."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def claimed_cuda() -> Iterator[ClaimedDevice]:
    """Claim a CUDA device, with events that have happened and nothing to wait for."""
    stand_ins = {"Event": Event, "synchronize": lambda *_: None, "_lazy_init": lambda: None}
    before = {name: getattr(torch.cuda, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new parameters
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor builds on the CPU and moves the result
    try:
        with ClaimedDevice() as mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        for name, own in before.items():
            setattr(torch.cuda, name, own)
