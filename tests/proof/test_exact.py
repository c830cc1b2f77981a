"""Every exact pair of draft mode and verifier samples from the target's distribution, on every tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.core.types import DraftMode
from lantern.drafters.trees.static import Choice, StaticTree
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof import draws, enumeration
from tests.proof.worlds import KINDS, TREES, world

MOST_DISTANCE, LEAST_P_VALUE = 1e-9, 1e-4
FEW_RUNS = 5000  # compared string by string
REJECTED: list[DraftMode] = ["point", "sampled", "iid"]
TOKENS_OF = {"disjoint": 4}  # p is positive on half of them


@pytest.mark.parametrize("mode", REJECTED)
@pytest.mark.parametrize("tree", TREES)
def test_rejection_matches_target_distribution(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        assert enumeration.distance(world(kind), RejectionVerifier(), mode, TREES[tree]) < MOST_DISTANCE


@pytest.mark.parametrize("mode", REJECTED)
def test_rejection_matches_target_distribution_with_three_or_six_tokens(mode: DraftMode) -> None:
    three, six = world("zeros", tokens=3, count=3), world("generic", tokens=6)
    assert enumeration.distance(three, RejectionVerifier(), mode, StaticTree(((0,), (1,), (0, 0), (0, 0, 0)))) < 1e-9
    assert enumeration.distance(six, RejectionVerifier(), mode, TREES["fan"]) < MOST_DISTANCE


def grow(lots: list[int]) -> StaticTree:
    """Return a tree in which each new node has a random parent."""
    nodes: list[Choice] = [()]
    for lot in lots:
        parent = nodes[lot % len(nodes)]
        nodes.append((*parent, sum(node[:-1] == parent for node in nodes if node)))
    return StaticTree(tuple(nodes[1:]))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lots=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    mode=st.sampled_from(REJECTED),
    kinds=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    tokens=st.sampled_from([4, 5]),
)
def test_rejection_is_exact_on_random_trees(
    lots: list[int], mode: DraftMode, kinds: str, seed: int, tokens: int
) -> None:
    made = enumeration.distance(world(kinds, seed, tokens=tokens), RejectionVerifier(), mode, grow(lots))
    assert made < MOST_DISTANCE


@pytest.mark.parametrize("mode", REJECTED)
def test_rejection_matches_target_distribution_over_several_steps(mode: DraftMode) -> None:
    pair = StaticTree(((0,), (1,)))
    for toy, tree in ((world("zeros", 3, count=3), TREES["unbalanced"]), (world("generic", 7, tokens=5), pair)):
        sampled = draws.draw(toy, RejectionVerifier(), mode, tree)
        assert sampled.p_value(toy.distribution()) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", KINDS)
def test_gumbel_match_of_drafts_that_read_its_noise_matches_target_distribution(kind: str) -> None:
    toy = world(kind)
    sampled = draws.draw(toy, GumbelVerifier(), "gumbel", TREES["unbalanced"])
    assert sampled.unlike_plain == 0
    assert sampled.p_value(toy.distribution()) > LEAST_P_VALUE


@pytest.mark.parametrize("mode", ["gumbel", "point", "sampled", "iid"])
@pytest.mark.parametrize("tree", TREES)
def test_gumbel_match_equals_plain_decoding(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        assert draws.draw(world(kind), GumbelVerifier(), mode, TREES[tree], runs=FEW_RUNS).unlike_plain == 0, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["random", "repeat-left"])
@pytest.mark.parametrize("redraw", ["coupled", "independent"])
def test_coupling_matches_target_distribution(redraw: str, init: str, kind: str) -> None:
    toy = world(kind, 1, tokens=TOKENS_OF.get(kind, 3), count=4)
    sampled = draws.draw_windows(toy, CouplingVerifier(redraw), 3, init)  # type: ignore[arg-type]
    assert sampled.unlike_plain > 0
    assert sampled.p_value(toy.distribution()) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["random", "repeat-left"])
def test_gumbel_windows_equal_plain_decoding(init: str, kind: str) -> None:
    toy = world(kind, 1, tokens=TOKENS_OF.get(kind, 3), count=4)
    assert draws.draw_windows(toy, GumbelVerifier(), 3, init, FEW_RUNS).unlike_plain == 0
