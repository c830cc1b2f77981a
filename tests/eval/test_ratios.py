import pytest
import torch

from lantern.eval.ratios import Spread, bootstrap, compare, quantile
from lantern.eval.rounds import take_turns, turn_order

CPU = torch.device("cpu")


def test_contenders_take_turns_in_rotated_order() -> None:
    ran: list[tuple[int, str]] = []
    runs = [lambda number, name=name: ran.append((number, name)) for name in "abc"]
    seconds, results_ = take_turns(runs, 4, device=CPU)
    assert [name for _, name in ran] == list("abcbcacababc")
    assert [number for number, _ in ran] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [len(of_one) for of_one in seconds] == [len(of_one) for of_one in results_] == [4, 4, 4]


def test_everyone_runs_once_in_every_place() -> None:
    orders = [turn_order(4, number) for number in range(4)]
    assert all(sorted(column) == [0, 1, 2, 3] for column in (*orders, *zip(*orders, strict=True)))


def test_quantiles_interpolate() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert quantile([7.0], 0.9) == 7.0


def test_the_ratio_of_medians_is_not_that_of_rounds() -> None:
    ratio = compare([1.0, 2.0, 3.0] * 4, [1.0, 1.0, 2.0] * 4)
    assert ratio.of_medians == 2.0
    assert ratio.of_rounds == 1.5
    assert 1.0 <= ratio.interval[0] <= 1.5 <= ratio.interval[1] <= 2.0


def test_steady_seconds_are_claimed() -> None:
    ratio = compare([2.0] * 10, [1.0] * 10)
    assert ratio.claim == 2.0 and ratio.refusal is None and ratio.interval == (2.0, 2.0)


def test_unsteady_seconds_are_not_claimed() -> None:
    noisy = [1.0] * 5 + [1.7] * 5
    for sides, name in (((noisy, [1.0] * 10), "baseline"), (([2.0] * 10, noisy), "method")):
        ratio = compare(*sides)
        assert ratio.claim is None
        assert ratio.refusal is not None and "no claim: p90/p10 is 1.7" in ratio.refusal and name in ratio.refusal


def test_a_ratio_that_may_be_either_side_of_one_is_not_claimed() -> None:
    ratio = compare([1.0, 1.1, 0.95, 1.05] * 3, [1.0] * 12)
    assert ratio.interval[0] <= 1 <= ratio.interval[1] and ratio.of_medians > 1
    assert ratio.claim is None and "either side of 1" in str(ratio.refusal)


def test_a_width_at_the_bound_is_claimed() -> None:
    assert Spread.of([1.0, 1.5]).width < 1.5
    assert compare([1.0] * 2 + [1.5] * 8, [1.0] * 10).claim is not None


def test_few_images_are_not_claimed() -> None:
    assert compare([2.0] * 9, [1.0] * 9).claim is None
    assert compare([2.0] * 3, [1.0] * 3, images=12).claim == 2.0


def test_the_interval_is_the_same_every_time() -> None:
    ratios = [1.0, 1.2, 0.9, 1.4, 1.1]
    assert bootstrap(ratios) == bootstrap(ratios)
