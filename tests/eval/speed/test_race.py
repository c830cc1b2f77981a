import pytest
import torch

from lantern.eval.speed.race import Spread, compare, interleave, median_interval, step_order

CPU = torch.device("cpu")


def test_contenders_run_in_rotated_order() -> None:
    ran: list[tuple[int, str]] = []
    runs = [lambda number, name=name: ran.append((number, name)) for name in "abc"]
    seconds, results_ = interleave(runs, 4, device=CPU)
    assert [name for _, name in ran] == list("abcbcacababc")
    assert [number for number, _ in ran] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [len(of_one) for of_one in seconds] == [len(of_one) for of_one in results_] == [4, 4, 4]


def test_every_contender_runs_once_in_every_position() -> None:
    orders = [step_order(4, number) for number in range(4)]
    assert all(sorted(column) == [0, 1, 2, 3] for column in (*orders, *zip(*orders, strict=True)))


def test_spread_interpolates_percentiles() -> None:
    spread = Spread.of([0.0, 10.0])
    assert (spread.median, spread.p10, spread.p90) == (5.0, pytest.approx(1.0), pytest.approx(9.0))
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratio_of_medians_differs_from_median_of_ratios() -> None:
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


def test_a_ratio_whose_interval_contains_one_is_not_claimed() -> None:
    ratio = compare([1.0, 1.1, 0.95, 1.05] * 3, [1.0] * 12)
    assert ratio.interval[0] <= 1 <= ratio.interval[1] and ratio.of_medians > 1
    assert ratio.claim is None and "contains 1" in str(ratio.refusal)


def test_a_width_at_the_bound_is_claimed() -> None:
    assert Spread.of([1.0, 1.5]).width < 1.5
    assert compare([1.0] * 2 + [1.5] * 8, [1.0] * 10).claim is not None


def test_few_images_are_not_claimed() -> None:
    assert compare([2.0] * 9, [1.0] * 9).claim is None
    assert compare([2.0] * 3, [1.0] * 3, images=12).claim == 2.0


def test_interval_is_deterministic() -> None:
    ratios = [1.0, 1.2, 0.9, 1.4, 1.1]
    assert median_interval(ratios) == median_interval(ratios)
