"""The tree of least time per token, compared with all trees."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.drafters.trees.static import Choice, StaticTree
from lantern.generation.tuning.costs import Costs, Linear
from lantern.generation.tuning.solve import likeliest_nodes, solve, tokens_per_step

DEPTH, WIDTH = 3, 3


def all_trees(nodes: int) -> Iterator[StaticTree]:
    """Every static tree of 1 to `nodes` drafted nodes within DEPTH and WIDTH, each once."""
    found: set[frozenset[Choice]] = {frozenset({(0,)})}
    for _ in range(nodes):
        yield from (StaticTree(tuple(choices)) for choices in found)
        found = {choices | {new} for choices in found for new in _next_nodes(choices)}


def _next_nodes(choices: frozenset[Choice]) -> Iterator[Choice]:
    for parent in ((), *choices):
        rank = sum(choice[:-1] == parent for choice in choices)
        if len(parent) < DEPTH and rank < WIDTH:
            yield (*parent, rank)


def falling(row: list[float]) -> list[float]:
    total = max(sum(row), 1.0)
    return sorted((rate / total for rate in row), reverse=True)


RATES = st.lists(
    st.lists(st.floats(0.01, 1), min_size=WIDTH, max_size=WIDTH).map(falling), min_size=DEPTH, max_size=DEPTH
)
VERIFY = st.lists(st.floats(0, 1), min_size=6, max_size=6).map(lambda parts: [sum(parts[: i + 1]) for i in range(6)])


@settings(max_examples=60, deadline=None)
@given(RATES, VERIFY, st.floats(0, 1), st.floats(0, 0.5))
def test_no_tree_takes_less_time_per_token(
    rates: list[list[float]], verify: list[float], per_level: float, per_node: float
) -> None:
    costs = Costs(tuple(1 + v for v in verify), Linear(0.1, per_level), Linear(0.2, 0.0, per_node), plain_host=0.1)
    best = solve(rates, costs, max_nodes=6, max_depth=DEPTH)[0]
    least = min(
        costs.step(nodes=tree.max_nodes, depth=tree.depth, inner=tree.num_inner) / tokens_per_step(tree, rates)
        for tree in all_trees(5)
    )
    assert best.seconds == pytest.approx(least)
    assert best.tau == pytest.approx(tokens_per_step(best.tree, rates))


@settings(max_examples=40, deadline=None)
@given(RATES, st.integers(1, 5))
def test_the_likeliest_nodes_are_the_tree_of_greatest_acceptance(rates: list[list[float]], nodes: int) -> None:
    taken = [choice for _, choice in likeliest_nodes(rates, DEPTH)][:nodes]
    if len(taken) == nodes:
        best = max(tokens_per_step(tree, rates) for tree in all_trees(nodes) if tree.max_nodes == nodes + 1)
        assert tokens_per_step(StaticTree(tuple(taken)), rates) == pytest.approx(best)


def costs(verify_slope: float, draft: float) -> Costs:
    return Costs(tuple(1 + verify_slope * n for n in range(32)), Linear(0.0, draft), Linear(), plain_host=0.05)


def test_a_drafter_that_is_never_accepted_is_not_chosen() -> None:
    free = costs(0.0, 0.0)
    assert solve([[1e-6] * 16] * 8, free, max_nodes=32, max_depth=8)[0].seconds > free.plain * 0.999
    assert solve([[0.0] * 16] * 8, free, max_nodes=32, max_depth=8) == []


def test_rates_that_rise_with_the_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        solve([[0.1, 0.2]], costs(0.1, 0.1), max_nodes=8, max_depth=1)


def test_plans_keep_to_the_nodes_and_depths_allowed() -> None:
    plans = solve([[0.5, 0.2, 0.1]] * 6, costs(0.001, 0.001), max_nodes=12, max_depth=5)
    assert {plan.tree.max_nodes for plan in plans} <= set(range(2, 13)) and max(p.tree.depth for p in plans) <= 5
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert len({plan.tree for plan in plans}) == len(plans)
