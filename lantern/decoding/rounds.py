"""Drivers: what takes the rounds of generations. Here by torch, with one joined pass for several generations."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from lantern.core.types import Scores
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import Inputs, State


class Rounds(Protocol):
    """Takes a round of each of some generations when called.

    With `patience` it may take rounds for so many seconds, until one of them is done; `step` of the generations is then
    that of an earlier round. The caches of several generations are views of `cache`.
    """

    cache: StaticCache

    def __call__(self, patience: float = 0.0) -> None:
        """Take a round of each generation."""
        ...


class TorchRounds:
    """Rounds whose passes the target runs as it is: that of one generation, or one pass for several.

    Each generation has a drafter, a verifier, noise and a sampling of its own. Up to rounding, as in any batch, it does
    not depend on the others. `earlier` rounds of some of them keep their places in the joined cache.
    """

    def __init__(self, states: Sequence[State], earlier: "Rounds | None" = None) -> None:
        self.states, self.cache = states, states[0].cache
        if len(states) > 1 or earlier is not None:
            self.cache = StaticCache.joined(
                [state.cache for state in states], None if earlier is None else earlier.cache
            )

    @torch.no_grad()
    def __call__(self, patience: float = 0.0) -> None:
        """Take a round of each generation."""
        if len(self.states) == 1:
            self.states[0].take()
            return
        parts = [state.draft() for state in self.states]
        scores = split(join(parts, self.cache).scores(self.states[0].target), parts)
        for state, own in zip(self.states, scores, strict=True):
            state.record(state.finish(own))


class Joint:
    """Takes rounds of generations that begin and end at any time; which ones may change between calls.

    `drive` makes the rounds of generations of one `group`, given those that it made before.
    """

    def __init__(
        self, group: Callable[[State], Hashable], drive: Callable[[Sequence[State], Rounds | None], Rounds]
    ) -> None:
        self._group, self._drive = group, drive
        self._groups: dict[Hashable, tuple[list[State], Rounds]] = {}

    def take(self, states: Sequence[State], patience: float = 0.0) -> None:
        """Take a round of each generation, or rounds for `patience` seconds until one is done, if all can be joined."""
        groups: dict[Hashable, list[State]] = {}
        before = {id(state): name for name, (members, _) in self._groups.items() for state in members}
        for state in states:
            name = self._group(state)
            groups.setdefault(name, []).append(state)
            if before.get(id(state), name) != name:
                state.cache.leave()  # its rows may be given to another generation of its former group
        self._groups = {name: known for name, known in self._groups.items() if name in groups}
        for name, members in groups.items():
            earlier, rounds = self._groups.get(name, ([], None))
            if rounds is None or set(map(id, earlier)) != set(map(id, members)):
                placed = in_their_places(members, earlier)
                rounds = self._drive(placed, rounds)
                self._groups[name] = placed, rounds
            rounds(patience if len(groups) == 1 else 0.0)


def in_their_places(members: Sequence[State], earlier: Sequence[State]) -> list[State]:
    """Return the members in an order in which those of the first `len(members)` of `earlier` keep their places."""
    kept, present = earlier[: len(members)], {id(one) for one in members}
    keeps = {id(one) for one in kept} & present
    others = iter([one for one in members if id(one) not in keeps])
    return [one if id(one) in keeps else next(others) for one in kept] + list(others)


def join(parts: Sequence[Inputs], cache: StaticCache) -> Inputs:
    """Return one pass for several, whose caches are views of `cache`. Trees are padded with copies of the last node.

    No node sees the padding. Slots are those of the largest tree, since slot i is for node i.
    """
    nodes = max(part.positions.shape[1] for part in parts)
    widest = next(part.slots for part in parts if part.slots.shape[1] == nodes)
    positions = torch.cat([pad(part.positions, nodes) for part in parts])
    return Inputs(
        torch.cat([pad(part.inputs, nodes) for part in parts]),
        positions,
        torch.cat([pad(part.mask, nodes) for part in parts]),
        cache,
        widest[:1].expand(len(positions), -1),
        torch.cat([pad(part.places, nodes) for part in parts]),
        parts[0].taps,
    )


def pad(x: Shaped[Tensor, "rows n *rest"], nodes: int) -> Shaped[Tensor, "rows m *rest"]:
    """Repeat the last node until there are `nodes`."""
    missing = nodes - x.shape[1]
    return torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], 1) if missing else x


def split(scores: Scores, parts: Sequence[Inputs]) -> list[Scores]:
    """Return the scores of each part of a joined pass, without padding."""
    made, row, tapped = list[Scores](), 0, scores.tapped
    for part in parts:
        rows, nodes = slice(row, row := row + len(part.positions)), part.positions.shape[1]
        own = None if tapped is None else tapped[rows, :nodes]
        made.append(Scores(scores.logits[rows, :nodes], scores.features[rows, :nodes], own))
    return made
