"""Fits of the times of a step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern.generation.tuning.costs import Costs, Laps, Linear, fit_costs, fit_linear, fit_verify, non_decreasing

SECONDS = st.floats(1e-6, 10)


def test_violators_of_the_order_are_pooled() -> None:
    assert non_decreasing([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert non_decreasing([3, 2, 1]) == [2, 2, 2]
    assert non_decreasing([]) == []


@given(st.dictionaries(st.integers(1, 40), SECONDS, min_size=1))
def test_verification_never_gets_cheaper_with_more_nodes(medians: dict[int, float]) -> None:
    fitted = fit_verify(medians, 40)
    assert len(fitted) == 40 and all(b >= a - 1e-9 for a, b in pairwise(fitted))
    assert fitted[0] >= min(medians.values()) - 1e-9


def test_the_curve_passes_through_medians_that_rise() -> None:
    medians = {1: 4.7, 8: 5.8, 16: 6.8, 32: 8.85, 64: 12.5}
    fitted = fit_verify(medians, 80)
    assert [fitted[n - 1] for n in medians] == pytest.approx(list(medians.values()))
    assert 4.7 < fitted[3] < 5.8 and 12.5 < fitted[79] < 15


def test_a_linear_cost_is_found_again() -> None:
    sizes = [(1, 0), (2, 1), (3, 5), (6, 5), (8, 20)]
    found = fit_linear(sizes, [0.5 + 2 * levels + 0.25 * nodes for levels, nodes in sizes])
    assert (found.fixed, found.per_level, found.per_node) == pytest.approx((0.5, 2, 0.25))


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=12))
def test_no_part_of_a_cost_is_negative(laps: list[tuple[int, int, float]]) -> None:
    found = fit_linear([lap[:2] for lap in laps], [lap[2] for lap in laps])
    assert min(found.fixed, found.per_level, found.per_node) >= 0


def test_parts_of_a_step_add_up() -> None:
    plain = Laps(1, 0, 0, verify=4.0, draft=0.0, step=5.0)
    sizes = [(2, 1, 0), (4, 3, 2), (8, 2, 3), (16, 4, 6), (16, 6, 9)]
    laps = [
        Laps(nodes, depth, inner, 4.0 + nodes, 0.5 + depth + 0.1 * inner, 4.0 + nodes + 0.5 + depth + 0.1 * inner + 2)
        for nodes, depth, inner in sizes
    ]
    costs = fit_costs(plain, laps, verify=tuple(4.0 + n for n in range(1, 17)))
    assert costs.plain == pytest.approx(6.0)
    for lap in laps:
        assert costs.step(nodes=lap.nodes, depth=lap.depth, inner=lap.inner) == pytest.approx(lap.step)


def test_the_host_time_of_a_step_is_at_least_plain_decodings() -> None:
    costs = Costs((1.0, 1.0), Linear(), Linear(), plain_host=0.5)
    assert costs.step(nodes=2, depth=1, inner=0) == costs.plain == 1.5


def test_costs_are_read_back_as_they_were_written() -> None:
    costs = Costs((1.0, 1.5, 2.5), Linear(0.1, 0.2, 0.3), Linear(0.4), plain_host=0.25)
    assert Costs.from_dict(costs.as_dict()) == costs
    with pytest.raises(ValueError, match="costs of steps: key 'draft' is missing"):
        Costs.from_dict({"verify": [1.0]})


def test_costs_are_extrapolated_with_the_last_slope() -> None:
    costs = Costs((1.0, 1.5, 2.5), Linear(), Linear(), plain_host=0.0)
    assert [costs.scored(n) for n in range(1, 6)] == [1.0, 1.5, 2.5, 3.5, 4.5]
    assert costs.step(nodes=5, depth=1, inner=0) == 4.5
