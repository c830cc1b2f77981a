"""Suffix automata: the longest suffix of a sequence that occurred before, in constant time per symbol.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; used for drafting by SAM decoding,
arXiv:2411.10666.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor


@dataclass
class AutomatonState:
    """All substrings with the same end positions: `next` state by symbol, suffix `link`, first `end`, longest `length`.

    State 0 is the empty string.
    """

    length: int
    link: int
    end: int
    next: dict[int, int] = field(default_factory=dict)


def automaton(symbols: Iterable[int]) -> list[AutomatonState]:
    """Return the states of all substrings, in constant time per symbol on average."""
    states, last = [AutomatonState(0, -1, -1)], 0
    for end, symbol in enumerate(symbols):
        fresh, place = len(states), last
        states.append(AutomatonState(end + 1, 0, end))
        while place != -1 and symbol not in states[place].next:
            states[place].next[symbol] = fresh
            place = states[place].link
        if place != -1:
            found, length = states[place].next[symbol], states[place].length + 1
            if states[found].length > length:  # too long to be a suffix here: a clone takes what is short enough
                clone, old = len(states), states[found]
                states.append(AutomatonState(length, old.link, old.end, dict(old.next)))
                while place != -1 and states[place].next.get(symbol) == found:
                    states[place].next[symbol] = clone
                    place = states[place].link
                old.link = found = clone
            states[fresh].link = found
        last = fresh
    return states


@dataclass(frozen=True)
class WalkTable:
    """An automaton as a table: every step is one look-up, so a device can walk it without the host.

    `symbol` in state s leads to state `next[s, symbol]` with `min(length, cap[s, symbol]) + 1` matched symbols, or none
    if that state is 0. `ends` holds where each state's first occurrence ends.

        symbols  a b a b c        x, a, b lead to a state with 2 matched symbols, whose first occurrence ends at
                                  position 1: "ab" is the longest suffix that occurs, and position 2 followed it
    """

    next: Int32[Tensor, "s k"]
    cap: Int32[Tensor, "s k"]
    ends: Int32[Tensor, " s"]

    @classmethod
    def of(cls, text: Iterable[int], symbols: int, device: torch.device | str = "cpu") -> "WalkTable":
        """Return the table of a text, in which walks find symbols 0 .. `symbols` - 1."""
        states = automaton(text)
        leads, caps = np.zeros((2, len(states), symbols), dtype=np.int32)
        for number in sorted(range(len(states)), key=lambda s: states[s].length):
            state = states[number]
            if number:  # a missing transition is that of the suffix, which is shorter: its row is complete
                leads[number], caps[number] = leads[state.link], caps[state.link]
            for symbol, target in state.next.items():
                if symbol < symbols:
                    leads[number, symbol], caps[number, symbol] = target, state.length
        ends = np.array([state.end for state in states], dtype=np.int32)
        return cls(*(torch.from_numpy(table).to(device) for table in (leads, caps, ends)))

    def step(self, state: Tensor, length: Tensor, symbol: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states and lengths of the longest matching suffixes after one more symbol each."""
        found = self.next[state, symbol].long()
        longer = torch.minimum(length, self.cap[state, symbol].long()) + 1
        return found, torch.where(found == 0, 0, longer)
