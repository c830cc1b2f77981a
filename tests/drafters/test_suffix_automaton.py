from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from lantern.drafters.lookup.suffix_automaton import WalkTable

SYMBOLS = 3
TEXT = st.lists(st.integers(0, SYMBOLS - 1), max_size=24)


def longest_suffix(text: Sequence[int], symbols: Sequence[int]) -> tuple[int, int]:
    """Return the length of the longest suffix of `symbols` that occurs in a text, and where it first ends, or -1."""
    for length in range(len(symbols), 0, -1):
        for end in range(length - 1, len(text)):
            if list(text[end - length + 1 : end + 1]) == list(symbols[-length:]):
                return length, end
    return 0, -1


@given(TEXT, st.lists(st.integers(0, SYMBOLS), min_size=1, max_size=12))
def test_a_walk_finds_the_longest_suffix_at_its_first_place(text: list[int], symbols: list[int]) -> None:
    table = WalkTable.of(text, SYMBOLS + 1)
    state = length = torch.zeros(1, dtype=torch.long)
    for count, symbol in enumerate(symbols, 1):
        state, length = table.step(state, length, torch.tensor([symbol]))
        assert (int(length), int(table.ends[state])) == longest_suffix(text, symbols[:count])
