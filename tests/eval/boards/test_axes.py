import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern.eval.boards.axes import beats, front, staircase

POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def test_front_of_the_example() -> None:
    costs, gains = [0.0, 1.0, 1.0, 2.0], [1.0, 3.0, 2.0, 1.0]
    assert front(costs, gains) == [True, True, False, False]


def test_equal_points_are_on_the_front_together() -> None:
    assert front([1.0, 1.0, 2.0], [2.0, 2.0, 2.0]) == [True, True, False]


def test_a_cheaper_point_of_equal_gain_dominates() -> None:
    assert beats((1.0, 2.0), (1.5, 2.0)) and not beats((1.0, 2.0), (1.0, 2.0)) and not beats((1.0, 2.0), (0.5, 1.0))


@given(POINTS)
def test_exactly_the_dominated_points_are_off_the_front(points: list[tuple[int, int]]) -> None:
    on = front(*zip(*points, strict=True))
    chosen = [point for point, is_on in zip(points, on, strict=True) if is_on]
    assert chosen
    for point, is_on in zip(points, on, strict=True):
        assert is_on != any(other[0] <= point[0] and other[1] >= point[1] and other != point for other in chosen)


def test_the_staircase_is_level_and_then_rises() -> None:
    assert staircase([2.0, 0.0, 1.0], [5.0, 1.0, 0.5]) == [(0.0, 1.0), (2.0, 1.0), (2.0, 5.0)]


def test_lists_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError):
        front([1.0], [])
