"""A wave: several generations decoded as one batch of constant size, which they enter and leave at any time.

An engine that replays captured rounds replays those of the batch: its memory stays in place. A generation that has
begun is copied to a free place, whatever its progress; places without one compute on and are not read.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lantern.core.types import copy_all
from lantern.core.weights import original, weights_of
from lantern.decoding.loop import State
from lantern.decoding.rounds import Rounds

SETTLING_ROUNDS = 2  # of a generation: the first ones observe fewer tokens than the rest

# by generation: its latest wave, whose memory serves later ones
WAVES: "WeakKeyDictionary[State, Wave]" = WeakKeyDictionary()


class Wave:
    """Takes the rounds of generations of one `Engine.group`, as many as `size` at most.

    After each round their `tokens`, `known` and statistics are those of the batch; their caches and drafters are not.
    """

    def __init__(self, state: State, size: int, drive: Callable[[State], Rounds]) -> None:
        assert state.batch_of is not None
        self.size, self.batch = size, state.batch_of(size)
        self.cache, self._drive = self.batch.cache, drive
        self._weights: tuple[Any, ...] = ()
        self._members, self._places = list[ref[State]](), WeakKeyDictionary[State, int]()
        for _ in range(SETTLING_ROUNDS):
            self.batch.take()

    def hold(self, states: Sequence[State], earlier: Rounds | None) -> "Wave":
        """Let these generations be in the batch, and no others; those that were in an `earlier` wave go on from there.

        Places of the others are free. A generation that has begun again since is a new one.
        """
        self.batch.target.refresh()
        if (weights := weights_of(original(self.batch.target))) != self._weights:  # those that a graph reads
            self._weights, self._rounds = weights, self._drive(self.batch)
        source = earlier if isinstance(earlier, Wave) else None
        inside = (
            {} if source is None else {one: at for one, at in source._places.items() if one.index >= SETTLING_ROUNDS}
        )
        kept = {one: at for one, at in inside.items() if source is self and one in states}
        free = iter([place for place in range(self.size) if place not in kept.values()])
        self._members, self._places = list(map(ref, states)), WeakKeyDictionary(kept)
        for state in states:
            WAVES[state] = self
            while state.index < SETTLING_ROUNDS and not state.is_done():
                state.take()
            if state in kept or state.is_done():
                continue
            batch, of = (source.batch, inside[state]) if source is not None and state in inside else (state, 0)
            self._places[state] = place = next(free)
            for mine, its in zip(self.batch.memory, batch.memory, strict=True):
                mine.copy_image(place, its, of)
        return self

    @torch.no_grad()
    def __call__(self, patience: float = 0.0) -> None:
        """Take a round of all generations."""
        states = [state for one in self._members if (state := one()) is not None]
        if any(state.index < SETTLING_ROUNDS for state in states):
            self.hold(states, self)
        self._rounds()
        batch, mine, its = self.batch, list[Tensor](), list[Tensor]()
        batch.statistics.forget()
        for state, place in self._places.items():
            names = ("tokens", "known", "total")
            mine += [vars(state.held)[name] for name in names]
            its += [vars(batch.held)[name][place : place + 1] for name in names]
            state.record(batch.step, slice(place, place + 1))
        copy_all(its, mine)


@torch.no_grad()
def wave_of(states: Sequence[State], earlier: Rounds | None, drive: Callable[[State], Rounds]) -> Wave:
    """Return the wave of some generations: the `earlier` one, one that they were in before, or a new one."""
    known = [earlier] if isinstance(earlier, Wave) else [WAVES[state] for state in states if state in WAVES]
    form = states[0].cache.form
    found = next((wave for wave in known if wave.size >= len(states) and wave.cache.form == form), None)
    if found is None:
        found = Wave(states[0], 1 << max(len(states) - 1, 1).bit_length(), drive)
    return found.hold(states, earlier)
