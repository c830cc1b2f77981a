"""One CUDA graph for a whole round, plain or drafted, replayed without work on the host."""

import dataclasses
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.types import Step, TreeShape, copy_all
from lantern.core.weights import original, weights_of
from lantern.decoding.loop import State
from lantern.decoding.rounds import TorchRounds
from lantern.decoding.wave import SETTLING_ROUNDS, WAVES

LOG = logging.getLogger("lantern")
Made = TypeVar("Made")
WARM_ROUNDS = 3  # of a generation before its capture: kernels are loaded when they first run
MOST_GRAPHS = 128
CAPTURING = threading.RLock()  # torch captures one graph at a time
SHARE = 0.25  # of a device's memory that generations with graphs may hold


@dataclasses.dataclass
class Captured:
    """A captured round, which reads and writes the `memory` of one generation with some weights.

    `is_forced`: tokens were given.
    """

    graph: Any
    step: Step
    memory: list["ref[Tensor]"]
    weights: tuple[Any, ...]
    is_forced: bool

    def fits(self, state: State) -> bool:
        """Return whether a generation can replay the graph: it has the same memory and weights."""
        memory = memory_of(state)
        is_same = len(memory) == len(self.memory)
        is_same = is_same and all(one is other() for one, other in zip(memory, self.memory, strict=True))
        is_same = is_same and self.is_forced == (state.forced is not None)
        return is_same and self.weights == weights_of(original(state.target))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, which the generation holds and its graph does not."""
        return sum(tensor.nbytes for one in self.memory if (tensor := one()) is not None)


# by generation, the latest used last; a generation that is gone takes its graph along
_GRAPHS: WeakKeyDictionary[State, Captured] = WeakKeyDictionary()


class GraphRounds(TorchRounds):
    """The rounds of a generation as replays of one captured graph, except for the first few.

    A round writes its state in place, so the graph replays for later generations of the same `State` too. Where a
    capture fails, rounds go on one operation at a time.
    """

    def __init__(self, state: State) -> None:
        super().__init__([state])
        self.state, self._is_refused, self._graph = state, False, None

    @torch.no_grad()
    def __call__(self, patience: float = 0.0) -> None:
        """Take a round: directly in the first steps of a generation, then as a replay."""
        state = self.state
        if state.index < SETTLING_ROUNDS:
            self._graph = None  # of an earlier generation of the same state
        elif self._graph is None and not self._is_refused:
            self._graph = self._known() or (self._try() if state.index >= WARM_ROUNDS else None)
        if self._graph is None:
            state.take()
            return
        self.replay(self._graph)
        state.watch.lap("replay")
        state.record(copy_of(self._graph.step))

    def _known(self) -> Captured | None:
        """Return the graph of an earlier generation if it fits this one's memory and weights."""
        found = _GRAPHS.get(self.state)
        if found is None or not found.fits(self.state):
            return None
        _GRAPHS[self.state] = _GRAPHS.pop(self.state)
        return found

    def _try(self) -> Captured | None:
        """Capture a round and keep the graph; None, with the reason in the log, if that fails."""
        state, watch = self.state, self.state.watch
        is_on, watch.is_on = watch.is_on, False  # a graph that is being captured cannot be waited for
        try:
            graph, step = self.capture()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # also of Triton, its compilers and drivers
            LOG.warning("no CUDA graph: %s; rounds run one operation at a time", one_line(error))
            self._is_refused = True
            return None
        finally:
            watch.is_on = is_on
        memory = list(map(ref, memory_of(state)))
        made = Captured(graph, step, memory, weights_of(original(state.target)), state.forced is not None)
        _GRAPHS.pop(state, None)
        _GRAPHS[state] = made
        while len(_GRAPHS) > 1 and (
            len(_GRAPHS) > MOST_GRAPHS or sum(one.nbytes for one in _GRAPHS.values()) > most_bytes()
        ):
            _GRAPHS.pop(next(iter(_GRAPHS)))
        watch.lap("capture")
        return made

    def capture(self) -> tuple[Any, Step]:
        """Return a graph of a round with the step whose tensors it writes."""
        return capture(self.state.round)

    def replay(self, captured: Captured) -> None:
        """Run the captured round."""
        captured.graph.replay()


@cache
def stream_of(device: int) -> torch.cuda.Stream:
    """Return the stream of captures on a device; torch has one, on the first device that captured."""
    return torch.cuda.Stream(device)


def capture(run: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Return a CUDA graph of what a function launches on the current device, which does not run, and its result."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        own = stream_of(torch.cuda.current_device())
        # another thread, such as a server's, may allocate meanwhile
        with CAPTURING, torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            made = run()
    except BaseException:
        torch.cuda.set_stream(stream)  # torch leaves that of the capture if it cannot end it
        raise
    return graph, made


def memory_of(state: State) -> list[Tensor]:
    """Return the large tensors of a generation, which are others whenever its sizes are."""
    assert state.cache is not None and state.noise is not None
    return [state.cache.buffer, state.tokens, state.known, *state.noise.tables]


def forget_all() -> None:
    """Drop all graphs, and waves that are idle: memory ran out, and each holds that of a generation."""
    _GRAPHS.clear()
    WAVES.clear()


def most_bytes() -> float:
    """Return the bytes that generations with graphs may hold."""
    return SHARE * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else float("inf")


def copy_of(step: Step) -> Step:
    """Return a step with its tensors in new memory, since the next replay overwrites them; scores are left out.

    Tensors of a dtype are copied by one launch.
    """
    old, new = list[Tensor](), list[Tensor]()

    def place(value: Any) -> Any:
        """Return a value with memory for its tensors."""
        if isinstance(value, Tensor):
            old.append(value)
            new.append(torch.empty_like(value))
            return new[-1]
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        if isinstance(value, TreeShape) and value.parents.ndim == 1:  # made once
            return value
        names = {field.name for field in dataclasses.fields(value)} - {"scores", "log_q", "samples"}
        return dataclasses.replace(value, **{name: place(getattr(value, name)) for name in names})

    made = place(step)
    copy_all(old, new)
    return made
