"""One CUDA graph for a whole step, plain or drafted, replayed without work on the host."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lantern.core.types import DraftTree, Step, Traits
from lantern.decoding.loop import Stepper
from lantern.engines.cuda.state import State
from lantern.engines.prepared import original, weights_of

LOG = logging.getLogger("lantern")
WARM_STEPS = 3  # before a capture: kernels are loaded when they first run
MOST_GRAPHS = 24  # of a target
SHARE = 0.25  # of a device's memory that the graphs of a target may hold; each holds that of a generation


@dataclasses.dataclass
class Captured:
    """A captured step with the memory that it reads and writes, ready for other generations of the same form.

    `parts` are weak references to what the generations share; a graph without them is not used again, nor is one of
    other `weights`, which it would keep in memory.
    """

    graph: Any
    step: Step
    state: State
    parts: tuple[Any, ...]
    weights: Any = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the generation's memory that it holds."""
        storages = [tensor.untyped_storage() for tensor in self.state.tensors.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def fits(self, state: State, parts: tuple[object, ...]) -> bool:
        """Return whether a generation in this state can replay the graph."""
        is_same = len(parts) == len(self.parts) and all(
            own() is part for own, part in zip(self.parts, parts, strict=True)
        )
        return is_same and state.form == self.state.form


# of each target, the latest last
_GRAPHS: WeakKeyDictionary[Any, list[Captured]] = WeakKeyDictionary()


def graphed(stepper: Stepper) -> Stepper:
    """Return a stepper that replays the steps of another from a graph; where there is no GPU, the other itself."""
    return GraphedStepper(stepper) if torch.cuda.is_available() else stepper


def forget(target: Any) -> None:
    """Drop the graphs of a target, which hold the memory of a generation each, and its weights."""
    _GRAPHS.pop(original(target), None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forget_all() -> None:
    """Drop the graphs of all targets: memory ran out, and each holds that of a generation."""
    _GRAPHS.clear()


class GraphedStepper(Stepper):
    """The steps of another stepper as replays of one captured graph, except for the first few.

    A graph reads and writes fixed memory, while a step leaves its results in fresh tensors. A captured step therefore
    ends by copying its results over its inputs (`HeldState`), where the replay reads them. Graphs are kept for the life
    of the target: a generation of the same form moves its state to the memory of the graph. A target decodes one batch
    at a time.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.watch = stepper, stepper.watch
        self._captured: Captured | None = None
        self._steps, self._is_refused = 0, False

    @property
    def state_holders(self) -> tuple[object, ...]:
        """Those of the stepper that is replayed."""
        return self.stepper.state_holders

    def record_step(self, step: Step) -> Step:
        """Record a step in the stepper; its codes are in memory that no later step or generation writes to."""
        recorded = self.stepper.record_step(step)
        return dataclasses.replace(recorded, codes=recorded.codes.clone()) if step.verdict is None else recorded

    def work(self) -> Step:
        """Run a step on the device: directly at first, then as a replay of an earlier graph or of one captured now."""
        if self._captured is None and self._steps == self.stepper.varying_steps:
            self._captured = self.join()
        if self._is_refused or (self._captured is None and self._steps < WARM_STEPS):
            self._steps += 1
            return copy_of(self.stepper.work())
        if self._captured is None:
            try:
                self._captured = self.capture()
            except torch.OutOfMemoryError:  # the batch is halved
                raise
            except RuntimeError as error:  # what a driver refuses; `held_work` has put the state back
                LOG.warning("steps run one by one, since no CUDA graph could be captured: %s", str(error)[:300])
                self._is_refused = True
                return copy_of(self.stepper.work())
            self.watch.lap("capture")
        self.replay(self._captured)
        self.watch.lap("replay")
        return copy_of(self._captured.step)

    def join(self) -> Captured | None:
        """Move the state to the memory of a graph that was captured before, and return the graph; None if none fits."""
        state, parts, weights = State(self.state_holders), self.stepper.parts, self._weights
        self._graphs[:] = [one for one in self._graphs if one.weights == weights]
        found = next((one for one in self._graphs if one.fits(state, parts)), None)
        if found is not None:
            state.move_to(found.state.tensors)
            self._graphs.remove(found)
            self._graphs.append(found)
        return found

    def capture(self) -> Captured:
        """Capture a step, which does not run it, and keep the graph."""
        graph, state = torch.cuda.CUDAGraph(), State(self.state_holders)
        # a thread of another library, such as a server's, may allocate meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step = self.held_work()
        return self.keep(graph, step, state)

    def keep(self, graph: Any, step: Step, state: State) -> Captured:
        """Keep a graph, captured in this state, for generations to come; drop those that were not used for longest."""
        state.settle()
        made = Captured(graph, step, state, tuple(map(ref, self.stepper.parts)), self._weights)
        graphs, most = self._graphs, most_bytes()
        graphs[:] = [one for one in graphs if all(part() is not None for part in one.parts)] + [made]
        while len(graphs) > MOST_GRAPHS or (len(graphs) > 1 and sum(one.nbytes for one in graphs) > most):
            del graphs[0]
        return made

    def replay(self, captured: Captured) -> None:
        """Run the captured step."""
        captured.graph.replay()

    def held_work(self) -> Step:
        """Run a step that leaves its state in the memory from which it was read."""
        state = HeldState(self.state_holders)
        try:
            with self.watch.paused():  # a graph that is being captured cannot be waited for
                made = self.stepper.work()
            start = made.start.clone()  # its memory is overwritten by `put_back`
            state.put_back()
        except BaseException:
            state.assign()
            raise
        return dataclasses.replace(made, start=start)

    @property
    def _graphs(self) -> list[Captured]:
        return _GRAPHS.setdefault(original(self.stepper.target), [])

    @property
    def _weights(self) -> Any:
        return weights_of(original(self.stepper.target))


class HeldState:
    """The tensors that some objects hold, in their attributes and in dataclasses and sequences there."""

    def __init__(self, state_holders: Iterable[object]) -> None:
        self._held = [
            (owner, name, value) for owner in state_holders for name, value in vars(owner).items() if holds(value)
        ]

    def put_back(self) -> None:
        """Copy the present tensors of the attributes to the original ones, and assign those again.

        New tensors that share memory with old ones are read before any is written. Tensors of one dtype are copied
        together, in one launch instead of one for each.
        """
        moves = [pair for owner, name, old in self._held for pair in pairs(old, getattr(owner, name))]
        written = {old.untyped_storage().data_ptr() for old, _ in moves}
        own = [new if new.untyped_storage().data_ptr() not in written else None for _, new in moves]
        read = [new for (_, new), kept in zip(moves, own, strict=True) if kept is None]
        copies = iter(together([torch.empty_like(new) for new in read], read))
        together([old for old, _ in moves], [next(copies) if new is None else new for new in own])
        self.assign()

    def assign(self) -> None:
        """Let the attributes hold the original tensors."""
        for owner, name, old in self._held:
            setattr(owner, name, old)


def together(targets: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Copy each source to its target, those of one dtype in one launch; return the targets."""
    by_kind: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_kind.setdefault((target.dtype, source.dtype), ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for pair in by_kind.values():
        torch._foreach_copy_(*pair)  # type: ignore[attr-defined]
    return targets


def most_bytes() -> float:
    """Return the bytes that the graphs of a target may hold."""
    return SHARE * torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else float("inf")


def holds(value: Any) -> bool:
    """Return whether a value contains tensors that a step may replace."""
    return next(tensors(value), None) is not None


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a tensor, a dataclass or a sequence."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors(entry)


def pairs(old: Any, new: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs of tensors at the same place of two values that are not identical; ValueError if sizes differ."""
    before, after = list(tensors(old)), list(tensors(new))
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        raise ValueError("a step left tensors of other sizes than it found: this drafter cannot be captured in a graph")
    return ((a, b) for a, b in zip(before, after, strict=True) if a is not b)


def copy_of(step: Step) -> Step:
    """Return the step with verdict and codes in new memory, since the next replay overwrites them.

    Steps of plain decoding already have their codes in memory that is not overwritten.
    """
    if step.verdict is None:
        return step
    kept = {
        field.name: value.clone() if isinstance(value := getattr(step.verdict, field.name), Tensor) else value
        for field in dataclasses.fields(step.verdict)
    }
    return dataclasses.replace(
        step,
        start=step.start.clone(),
        counts=step.counts.clone(),
        codes=step.codes.clone(),
        tree=copy_of_tree(step.tree),
        verdict=dataclasses.replace(step.verdict, **kept),
    )


def copy_of_tree(tree: DraftTree | None) -> DraftTree:
    """Return the tree with codes in new memory, and shape and traits too if they are made in every step."""
    assert tree is not None
    shape, traits = tree.shape, tree.traits
    if shape.parents.ndim == 2:
        names = ("parents", "ranks", "depths", "ancestors")
        shape = dataclasses.replace(shape, **{name: getattr(shape, name).clone() for name in names})
    if traits is not None:
        traits = Traits(traits.nodes.clone(), traits.beams.clone())
    return dataclasses.replace(tree, tokens=tree.tokens.clone(), shape=shape, traits=traits)
