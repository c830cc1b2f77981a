"""How much of a generation the two networks take, seen from outside: their methods are timed while it runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from lantern.eval.rounds import now


class NetworkClock:
    """Seconds of every call of the watched methods, by label; `outer` adds up those that no other was running around.

    With a GPU each call waits for the device before and after it, so shares are right and totals a little long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all calls so far."""
        self.outer = 0.0
        self.calls: dict[str, list[float]] = {}

    def typical(self, label: str) -> float | None:
        """The median seconds of a call, or None if there was none."""
        return median(self.calls[label]) if self.calls.get(label) else None

    @contextmanager
    def watching(self, watched: Mapping[str, tuple[object, Sequence[str]]]) -> Iterator["NetworkClock"]:
        """Times methods of objects: label -> (object, names). They are as they were afterwards."""
        undo: list[Callable[[], object]] = []
        try:
            for label, (thing, names) in watched.items():
                undo += [self._watch(thing, name, f"{label}.{name}") for name in names if hasattr(thing, name)]
            yield self
        finally:
            for one in reversed(undo):
                one()

    def _watch(self, thing: Any, name: str, label: str) -> Callable[[], object]:
        inner, own = getattr(thing, name), vars(thing).get(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._nested += 1
            begin = now(self._device)
            try:
                return inner(*args, **kwargs)
            finally:
                spent = now(self._device) - begin
                self._nested -= 1
                self.calls.setdefault(label, []).append(spent)
                self.outer += spent if self._nested == 0 else 0.0

        # past a module's own __setattr__, which keeps books of what it is given
        object.__setattr__(thing, name, timed)
        return (lambda: object.__setattr__(thing, name, own)) if own else (lambda: object.__delattr__(thing, name))


NETWORKS = {"target": ("forward", "features", "head"), "drafter": ("forward",)}


def networks(target: object, drafter: object | None) -> dict[str, tuple[object, Sequence[str]]]:
    """What to watch of a method: its target, and the module of its drafter if that has one."""
    module = getattr(drafter, "module", None)
    found: dict[str, tuple[object, Sequence[str]]] = {"target": (target, NETWORKS["target"])}
    if module is not None:
        found["drafter"] = (module, NETWORKS["drafter"])
    return found
