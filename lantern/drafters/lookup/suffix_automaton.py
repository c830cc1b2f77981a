"""Suffix automata: the longest suffix of a sequence that occurred before, in constant time per symbol.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; used for drafting by SAM decoding,
arXiv:2411.10666. A state represents all substrings with the same set of end positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor


@dataclass
class State:
    """A state: `next` by symbol, suffix `link`, `length` of its longest substring, position of its first `end`."""

    length: int
    link: int
    end: int
    next: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """All substrings of the symbols passed to `extend` so far. State 0 is the empty string.

    symbols  a b a b c        `match([x, a, b])` gives (2, 1): "ab" is the longest suffix that occurs, and its first
                              occurrence ends at position 1, so the symbol at position 2 followed it.
    """

    def __init__(self, symbols: Iterable[int] = ()) -> None:
        self.states = [State(0, -1, -1)]
        self._last = 0
        self.count = 0
        for symbol in symbols:
            self.extend(symbol)

    def extend(self, symbol: int) -> None:
        """Append a symbol; constant time on average."""
        states, fresh = self.states, len(self.states)
        states.append(State(states[self._last].length + 1, 0, self.count))
        self.count += 1
        place = self._last
        while place != -1 and symbol not in states[place].next:
            states[place].next[symbol] = fresh
            place = states[place].link
        if place != -1:
            states[fresh].link = self._link(place, symbol)
        self._last = fresh

    def _link(self, place: int, symbol: int) -> int:
        """Return the suffix link of a new state: the state found, or a clone of it that is short enough."""
        states, found = self.states, self.states[place].next[symbol]
        length = states[place].length + 1
        if states[found].length == length:
            return found
        clone, old = len(states), states[found]
        states.append(State(length, old.link, old.end, dict(old.next)))
        while place != -1 and states[place].next.get(symbol) == found:
            states[place].next[symbol] = clone
            place = states[place].link
        old.link = clone
        return clone

    def repeat(self) -> tuple[int, int]:
        """Return the length of the longest suffix that occurred earlier, and where it first ended (-1: nowhere)."""
        link = self.states[max(self.states[self._last].link, 0)]
        return link.length, link.end

    def step(self, state: int, length: int, symbol: int) -> tuple[int, int]:
        """Return the state and length of the longest matching suffix after one more symbol."""
        while state != 0 and symbol not in self.states[state].next:
            state = self.states[state].link
            length = self.states[state].length
        if symbol not in self.states[state].next:
            return 0, 0
        return self.states[state].next[symbol], length + 1

    def match(self, symbols: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest suffix of `symbols` that occurs, and where it first ends (-1: nowhere)."""
        state = length = 0
        for symbol in symbols:
            state, length = self.step(state, length, symbol)
        return length, self.states[state].end if length else -1


@dataclass(frozen=True)
class WalkTable:
    """An automaton as a table: every step is one look-up, so a device can walk it without the host.

    `symbol` in state s leads to state `next[s, symbol]` with `min(length, cap[s, symbol]) + 1` matched symbols, or none
    if that state is 0. `ends` holds where each state's first occurrence ends.
    """

    next: Int32[Tensor, "s k"]
    cap: Int32[Tensor, "s k"]
    ends: Int32[Tensor, " s"]

    @classmethod
    def of(cls, automaton: SuffixAutomaton, symbols: int) -> "WalkTable":
        """Complete the transitions of symbols 0 .. `symbols` - 1; a missing one is that of the suffix link."""
        states = automaton.states
        leads = np.zeros((len(states), symbols), dtype=np.int32)
        caps = np.zeros((len(states), symbols), dtype=np.int32)
        for number in sorted(range(len(states)), key=lambda s: states[s].length):
            state = states[number]
            if number:  # suffixes are shorter, so their rows are complete
                leads[number], caps[number] = leads[state.link], caps[state.link]
            for symbol, target in state.next.items():
                if symbol < symbols:
                    leads[number, symbol], caps[number, symbol] = target, state.length
        ends = torch.tensor([state.end for state in states], dtype=torch.int32)
        return cls(torch.from_numpy(leads), torch.from_numpy(caps), ends)

    def to(self, device: torch.device) -> "WalkTable":
        """Return the same on a device."""
        return WalkTable(self.next.to(device), self.cap.to(device), self.ends.to(device))

    def step(self, state: Tensor, length: Tensor, symbol: Tensor) -> tuple[Tensor, Tensor]:
        """Run `SuffixAutomaton.step` for tensors of states, lengths and symbols of one shape."""
        found = self.next[state, symbol].long()
        longer = torch.minimum(length, self.cap[state, symbol].long()) + 1
        return found, torch.where(found == 0, 0, longer)
