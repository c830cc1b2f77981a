"""Suffix automata against brute force."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from lantern.drafters.lookup.suffix_automaton import SuffixAutomaton, WalkTable

SYMBOLS = 3
TEXT = st.lists(st.integers(0, SYMBOLS - 1), max_size=24)


def longest_suffix(output: Sequence[int], symbols: Sequence[int], before: int) -> tuple[int, int]:
    """Return the length of the longest suffix of `symbols` in `output` that ends before `before`, and its first end."""
    for length in range(len(symbols), 0, -1):
        ends = [i + length - 1 for i in range(len(output)) if list(output[i : i + length]) == list(symbols[-length:])]
        ends = [end for end in ends if end < min(before, len(output))]
        if ends:
            return length, ends[0]
    return 0, -1


@given(TEXT, st.lists(st.integers(0, SYMBOLS), max_size=12))
def test_match_is_the_longest_suffix_at_its_first_place(output: list[int], symbols: list[int]) -> None:
    assert SuffixAutomaton(output).match(symbols) == longest_suffix(output, symbols, len(output))


@given(TEXT)
def test_repeat_is_the_longest_suffix_that_ended_earlier(output: list[int]) -> None:
    assert SuffixAutomaton(output).repeat() == longest_suffix(output, output, len(output) - 1)


@given(TEXT, st.lists(st.integers(0, SYMBOLS), min_size=1, max_size=12))
def test_walk_table_matches_the_automaton(output: list[int], symbols: list[int]) -> None:
    automaton = SuffixAutomaton(output)
    table = WalkTable.of(automaton, SYMBOLS + 1)
    state = length = torch.zeros(1, dtype=torch.long)
    expected = 0, 0
    for symbol in symbols:
        state, length = table.step(state, length, torch.tensor([symbol]))
        expected = automaton.step(*expected, symbol)
        assert (int(state), int(length)) == expected
    assert int(table.ends[state]) == automaton.states[expected[0]].end


@given(TEXT)
def test_an_automaton_has_at_most_twice_as_many_states_as_symbols(output: list[int]) -> None:
    assert len(SuffixAutomaton(output).states) <= max(2 * len(output), 1) + 1
