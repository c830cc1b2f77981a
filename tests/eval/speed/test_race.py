"""The loop over rounds, and what seconds claim."""

from collections.abc import Iterator
from typing import Any

import pytest

from lantern.eval.speed.race import collect, compare, race, spread


def records(wants: Any = lambda one, number: True) -> Iterator[dict[str, Any]]:
    def take(one: Any, number: int, job: Any) -> dict[str, Any]:
        return {"contender": one, "round": number, "job": job}

    field: Any = "abc"
    jobs: Any = "wxyz"
    return race(field, jobs, take, wants=wants)


def test_contenders_run_in_rotated_order() -> None:
    found = list(records())
    assert "".join(one["contender"] for one in found) == "abcbcacababc"
    assert [one["round"] for one in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "".join(one["job"] for one in found) == "wwwxxxyyyzzz"


def test_contenders_that_a_round_does_not_want_are_left_out() -> None:
    found = list(records(lambda one, number: number != 1 and (one, number) != ("a", 0)))
    assert "".join(one["contender"] for one in found) == "bccababc"


@pytest.mark.parametrize(("number", "left"), [(3, 3), (7, 6), (11, 9)])
def test_a_signal_leaves_whole_rounds(number: int, left: int) -> None:
    def stopped(count: int) -> Iterator[dict[str, Any]]:
        for one, _ in zip(records(), range(count), strict=False):
            yield one
        raise KeyboardInterrupt("terminated")

    found, stop = collect(stopped(number), 3)
    assert len(found) == left and str(stop) == "terminated"
    with pytest.raises(KeyboardInterrupt, match="terminated"):
        collect(stopped(2), 3)


def test_spread_interpolates_percentiles() -> None:
    assert spread([0.0, 10.0]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    assert spread([7.0]) == {"median": 7.0, "p10": 7.0, "p90": 7.0}


def test_ratio_of_medians_differs_from_median_of_ratios() -> None:
    found = compare([1.0, 2.0, 3.0] * 4, [1.0, 1.0, 2.0] * 4)
    low, high = found["interval_95"]
    assert (found["ratio_of_medians"], found["median_of_ratios"]) == (2.0, 1.5) and 1.0 <= low <= 1.5 <= high <= 2.0


NOISY = [1.0] * 5 + [1.7] * 5


@pytest.mark.parametrize(
    ("baseline", "other", "images", "refusal"),
    [
        ([2.0] * 10, [1.0] * 10, None, None),
        (NOISY, [1.0] * 10, None, "no claim: p90/p10 is 1.7 for the baseline"),
        ([2.0] * 10, NOISY, None, "no claim: p90/p10 is 1.7 for the method"),
        ([1.0] * 2 + [1.5] * 8, [1.0] * 10, None, None),  # a width at the bound
        ([1.0, 1.1, 0.95, 1.05] * 3, [1.0] * 12, None, "contains 1"),
        ([2.0] * 9, [1.0] * 9, None, "no claim: 9 images each"),
        ([2.0] * 3, [1.0] * 3, 12, None),
    ],
)
def test_unsure_ratios_are_not_claimed(
    baseline: list[float], other: list[float], images: int | None, refusal: str | None
) -> None:
    found = compare(baseline, other, images=images)
    assert (found["claim"] is None) == (found["refusal"] is not None) == (refusal is not None)
    assert found["claim"] in (None, found["ratio_of_medians"]) and (refusal or "") in str(found["refusal"])
