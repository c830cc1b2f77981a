"""Every exact pair of draft mode and verifier has the target's law, on every tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.trees.static import Choice, StaticTree
from lantern.types import DraftMode
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof import draws, enumeration
from tests.proof.worlds import KINDS, TREES, world

MOST_DISTANCE, LEAST_P_VALUE = 1e-9, 1e-4
REJECTED: list[DraftMode] = ["point", "sampled", "iid"]
CODES_OF = {"disjoint": 4}  # of which p has half, so that there is something to draw


@pytest.mark.parametrize("mode", REJECTED)
@pytest.mark.parametrize("tree", TREES)
def test_rejection_has_the_targets_law(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        assert enumeration.distance(world(kind), RejectionVerifier(), mode, TREES[tree]) < MOST_DISTANCE


@pytest.mark.parametrize("mode", REJECTED)
def test_rejection_has_the_law_of_three_codes_and_of_six_siblings_to_be(mode: DraftMode) -> None:
    three, six = world("zeros", codes=3, count=3), world("generic", codes=6)
    assert enumeration.distance(three, RejectionVerifier(), mode, StaticTree(((0,), (1,), (0, 0), (0, 0, 0)))) < 1e-9
    assert enumeration.distance(six, RejectionVerifier(), mode, TREES["fan"]) < MOST_DISTANCE


def grow(sizes: list[tuple[int, int]]) -> StaticTree:
    """A tree by choices of a parent among the nodes that are there."""
    nodes: list[Choice] = [()]
    for lot, _ in sizes:
        parent = nodes[lot % len(nodes)]
        nodes.append((*parent, sum(node[:-1] == parent for node in nodes if node)))
    return StaticTree(tuple(nodes[1:]))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lots=st.lists(st.tuples(st.integers(0, 9), st.just(0)), min_size=1, max_size=4),
    mode=st.sampled_from(REJECTED),
    kinds=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    codes=st.sampled_from([4, 5]),
)
def test_rejection_has_the_targets_law_on_random_trees(
    lots: list[tuple[int, int]], mode: DraftMode, kinds: str, seed: int, codes: int
) -> None:
    made = enumeration.distance(world(kinds, seed, codes=codes), RejectionVerifier(), mode, grow(lots))
    assert made < MOST_DISTANCE


@pytest.mark.parametrize("mode", REJECTED)
def test_rejection_has_the_targets_law_over_several_steps(mode: DraftMode) -> None:
    toy = world("zeros", 3, count=3)
    drawn = draws.draw(toy, RejectionVerifier(), mode, TREES["unbalanced"])
    assert drawn.p_value(toy.law()) > LEAST_P_VALUE


@pytest.mark.parametrize("mode", ["gumbel", "point", "sampled", "iid"])
@pytest.mark.parametrize("tree", TREES)
def test_gumbel_match_is_plain_decoding_and_has_the_targets_law(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        toy = world(kind)
        drawn = draws.draw(toy, GumbelVerifier(), mode, TREES[tree])
        assert drawn.unlike_plain == 0, kind
        assert drawn.p_value(toy.law()) > LEAST_P_VALUE, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["random", "repeat-left"])
@pytest.mark.parametrize("redraw", ["coupled", "independent"])
def test_coupling_has_the_targets_law(redraw: str, init: str, kind: str) -> None:
    toy = world(kind, 1, codes=CODES_OF.get(kind, 3), count=4)
    drawn = draws.draw_windows(toy, CouplingVerifier(redraw), 3, init)  # type: ignore[arg-type]
    assert drawn.unlike_plain > 0
    assert drawn.p_value(toy.law()) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["random", "repeat-left"])
def test_gumbel_windows_are_plain_decoding(init: str, kind: str) -> None:
    toy = world(kind, 1, codes=CODES_OF.get(kind, 3), count=4)
    drawn = draws.draw_windows(toy, GumbelVerifier(), 3, init)
    assert drawn.unlike_plain == 0
    assert drawn.p_value(toy.law()) > LEAST_P_VALUE
