"""The cost-optimal policy against all trees of a small world."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.core.types import DraftTree, Step, TreeShape, Verdict
from lantern.drafters.policies.costs import AssumedCosts
from lantern.drafters.policies.optimal import Optimal
from lantern.drafters.policies.policy import Limits, Pool
from tests.drafters.policies.layers import layer

CPU = torch.device("cpu")
DEPTHS = [1, 1, 2, 2, 3]


def wish_at(chances: list[float], costs: AssumedCosts) -> tuple[int, int]:
    """Nodes and depth by the policy, of five candidates over three depths."""
    policy = Optimal(costs=costs)
    state = policy.begin(Limits(1, 5, 3, 2, CPU))
    pool = Pool(torch.tensor([chances]).log(), torch.tensor(DEPTHS), 3, 5)
    size = policy.preferred_size(pool, state)
    return int(size.nodes), int(size.depth)


def rate(chances: list[float], nodes: int, depth: int, costs: AssumedCosts) -> float:
    best = sorted((c for c, d in zip(chances, DEPTHS, strict=True) if d <= depth), reverse=True)[:nodes]
    return (1 + sum(best)) / costs.step(nodes=nodes + 1, depth=depth, inner=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0.01, 0.95), min_size=5, max_size=5),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_no_size_gives_more_codes_for_its_time(chances: list[float], node: float, level: float) -> None:
    costs = AssumedCosts(node, level)
    found = rate(chances, *wish_at(chances, costs), costs)
    assert found >= max(rate(chances, n, d, costs) for n, d in product(range(1, 6), range(1, 4))) - 1e-5


def test_dear_nodes_make_small_trees_and_free_ones_large() -> None:
    chances = [0.5, 0.3, 0.25, 0.1, 0.08]
    assert wish_at(chances, AssumedCosts(node=2.0, level=0.0))[0] == 1
    assert wish_at(chances, AssumedCosts(node=0.0, level=0.0)) == (5, 3)
    assert wish_at(chances, AssumedCosts(node=0.0, level=3.0))[1] == 1


def chain_step(length: int, counts: int | None = None) -> Step:
    """A chain of two drafted codes in one image, of which `length` were accepted."""
    shape = TreeShape(
        torch.tensor([[0, 0, 1]]),
        torch.tensor([[0, 0, 0]]),
        torch.tensor([[0, 1, 2]]),
        torch.ones(1, 3, 3).bool(),
        (1, 1),
    )
    tree = DraftTree(torch.zeros(1, 3, dtype=torch.long), shape, "gumbel")
    path = torch.tensor([[1, 2]]) * (torch.arange(2) < length)
    kept = torch.tensor([length + 1 if counts is None else counts])
    verdict = Verdict(path, torch.tensor([length]), torch.zeros(1, dtype=torch.long))
    return Step(1, torch.tensor([3]), kept, torch.zeros(1, 3, dtype=torch.long), None, tree, verdict)


def test_probabilities_are_calibrated_by_results() -> None:
    policy = Optimal(memory=1.0)
    state = policy.begin(Limits(1, 2, 2, 1, CPU))
    expected = torch.tensor([[0.0, 0.5, 0.5]]).log().nan_to_num(neginf=0.0)
    for _ in range(40):
        state = policy.observe(state, chain_step(1), expected)
    taken, hoped, _ = state
    # At depth 0 all of 40 were accepted where 20 were expected, at depth 1 none.
    assert taken.tolist() == [[46.0, 6.0]] and hoped.tolist() == [[26.0, 26.0]]
    given = layer(0, match=torch.full((1, 1, 1), 0.5).log(), reach=torch.zeros(1, 1))
    assert policy.chances(given, state)[0].exp().item() == pytest.approx(0.5 * 46 / 26)


def test_finished_images_do_not_change_the_state() -> None:
    policy = Optimal(memory=0.5)
    state = policy.begin(Limits(1, 2, 2, 1, CPU))
    after = policy.observe(state, chain_step(0, counts=0), torch.zeros(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
