"""A CUDA device that only claims to be one: tensors compute on the CPU, and the rules of a device are checked.

`ClaimedDevice` is a mode in which `device="cuda"` works without a GPU. A tensor there says that it is on `cuda:0`, has
its numbers in memory of the CPU, and is refused wherever torch would refuse it: beside a tensor of the CPU in the same
operation. Whatever a GPU would have to wait for, or could not capture in a graph, is recorded.

`Rehearsed` stands for rounds in graphs, there or on the CPU: a capture records every operation of torch, and a replay
runs them again on the same memory.
"""

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from lantern.core.types import Drafter, Step, Target
from lantern.decoding.loop import State
from lantern.decoding.rounds import Rounds
from lantern.decoding.wave import Wave
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.graphs import Captured, GraphRounds

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[3]
SOURCES = tuple(f"{ROOT / folder}/" for folder in ("lantern", "models", "eval"))
# results of these have a size or a value that the host reads
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive")
WAITS += ("equal", "allclose", "bincount")
LACKS = {("scatter_reduce", torch.bool)}  # operations that torch has for a CPU alone, with the dtype


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
    return mapped(lambda x: x.held if isinstance(x, Claimed) else x, value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """As `tree_map`, for what operations take and return, in a fraction of its time."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [mapped(change, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return {name: mapped(change, part) for name, part in value.items()} if isinstance(value, dict) else change(value)


@cache
def written_by(function: Any) -> list[tuple[int, str]]:
    """Return the numbers and names of the arguments that an operation writes to."""
    infos = [(number, one.name, one.alias_info) for number, one in enumerate(function._schema.arguments)]
    return [(number, name) for number, name, info in infos if info is not None and info.is_write]


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
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        tensors = list[Tensor]()

        def taken(x: Any) -> Any:
            if isinstance(x, Tensor):
                tensors.append(x)
            return x.held if isinstance(x, Claimed) else x

        on_cpu, named = mapped(taken, args), mapped(taken, kwargs)
        claimed = any(isinstance(x, Claimed) for x in tensors)
        given = kwargs.get("device")
        target = claimed if given is None else torch.device(given).type == "cuda"
        if claimed or (target and name in self.allowed_on_cpu):
            self.check(name, tensors, args, kwargs)
        if given is not None and torch.device(given).type == "cuda":
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        run = lstm_cell if name == "_thnn_fused_lstm_cell" else function
        made = run(*on_cpu, **named)
        return self.rewrapped(function, args, kwargs, made, target)

    def check(self, name: str, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse tensors of the CPU beside claimed ones, except single numbers and copies; record waits."""
        if (name, tensors[0].dtype) in LACKS:
            raise NotImplementedError(f"{name} of {tensors[0].dtype}, which torch has not for a GPU")
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
        places = written_by(function)
        written = [args[number] if number < len(args) else kwargs.get(name) for number, name in places]
        own = {id(x.held) if isinstance(x, Claimed) else id(x): x for x in written if isinstance(x, Tensor)}

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, Claimed):
                return x
            return own.get(id(x), Claimed(x) if is_claimed else x)

        return mapped(wrap, made)


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


@contextmanager
def claimed_cuda() -> Iterator[ClaimedDevice]:
    """Claim a CUDA device, with events that have happened and nothing to wait for."""
    event = Mock(spec=["record", "synchronize"])
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new parameters
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor builds on the CPU and moves the result
    try:
        with (
            patch.multiple(torch.cuda, Event=lambda: event, synchronize=lambda *_: None, _lazy_init=lambda: None),
            ClaimedDevice() as mode,
        ):
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


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
        known = {address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        given = tree_map(self.noted, (args, kwargs or {}))
        made = function(*args, **(kwargs or {}))
        fresh = [x if isinstance(x, Tensor) and address(x) not in known else None for x in tree_leaves(made)]
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
            again = tree_leaves(function(*args, **kwargs))
            for old, new in zip(fresh, again, strict=True):
                if old is not None:
                    old.copy_(new)


def launch(run: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Run a kernel on what claimed tensors hold; recordings under way keep it."""

    def on_held(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            run(*held(args), **held(kwargs))

    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recording):
            mode.operations.append((on_held, *tree_map(mode.noted, (args, kwargs)), [None]))
    on_held(*args, **kwargs)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Rehearsed(GraphRounds):
    """Counts captures and replays; `waits` are those of the last captured round, if the device is known."""

    captured = replayed = 0
    device: ClassVar[ClaimedDevice | None] = None
    waits: ClassVar[list[str] | None] = None

    def capture(self) -> tuple[Any, Step]:
        """Record a round; what it wrote in place is put back, since a capture does not run it."""
        rounds, waits = type(self), [] if self.device is None else self.device.waits
        rounds.captured += 1
        kept = {id(tensor): (tensor, tensor.clone()) for tensor in memory_of(self.state)}
        with Recording() as recording, torch.no_grad():
            before = len(waits)
            step = self.state.round()
            rounds.waits = waits[before:]
        for tensor, value in kept.values():
            tensor.copy_(value)
        return recording, step

    def replay(self, captured: Captured) -> None:
        type(self).replayed += 1
        super().replay(captured)


def watching(device: ClaimedDevice) -> type[Rehearsed]:
    """Return a class of rounds on that device, with counts of its own."""
    return type("Watched", (Rehearsed,), {"device": device, "captured": 0, "replayed": 0})


@dataclass(frozen=True)
class RehearsedEngine(GraphEngine):
    """The engine `graph` with recordings for graphs, and passes by torch."""

    rounds: type[GraphRounds] = Rehearsed

    def why_not(self, target: Target, drafter: Drafter | None = None, *, can_wait: bool = True) -> None:
        return None

    def _prepare(self, target: Any) -> Target:
        return target

    def prepare_part(self, module: Any) -> Any:
        return module

    def drive(self, states: Sequence[State], earlier: Rounds | None = None) -> Rounds:
        is_one = len(states) == 1 and not isinstance(earlier, Wave)
        return self.rounds(states[0]) if is_one else super().drive(states, earlier)

    def keeps_bits(self, target: Target, nodes: int, lines: int) -> bool:
        return False


def memory_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors that a generation, its drafter and what these hold may write to."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if 0 not in value.stride() and not value.requires_grad:
            yield value
    elif isinstance(value, list | tuple | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from memory_of(entry, seen)
    elif type(value).__module__.startswith("lantern.") and hasattr(value, "__dict__"):
        yield from memory_of(value.__dict__, seen)
