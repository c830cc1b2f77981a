"""Method "auto" beside plain decoding: the arithmetic of the table, and a run at toy size."""

import dataclasses

import pytest

from lantern.drafters.windows.jacobi import TRIAL
from lantern.generation import generator
from lantern.methods import METHODS
from lantern.models.folder import Model
from studies.auto_choice import Row, measure, table
from tests.tiny import tiny_target

WINDOW = METHODS["gumbel-jacobi"].with_options(window=4)
ROW = Row("B", "cpu", WINDOW, plain_ms=10.0, chosen_ms=12.0, spread=1.1, codes=256)


def test_a_window_commits_at_most_its_length() -> None:
    assert ROW.speedup(2.4) == pytest.approx(2.0) and ROW.speedup(9.0) == pytest.approx(4 * 10 / 12)
    assert dataclasses.replace(ROW, method=METHODS["plain"]).speedup(3.0) == 1.0


def test_a_window_that_is_given_up_costs_its_trial_only() -> None:
    row = dataclasses.replace(ROW, method=WINDOW.with_options(least=1.2))
    assert row.speedup(1.2) == pytest.approx(1.0) and row.speedup(2.0) == ROW.speedup(2.0)
    assert row.speedup(1.0) == pytest.approx(256 / (TRIAL * 1.2 + 256 - TRIAL))


def test_a_choice_that_is_slower_by_more_than_the_spread_is_marked() -> None:
    assert ROW.holds(1.5) and not ROW.holds(1.0)
    lines = table([ROW], (1.0, 3.0))
    assert "0.83x slower" in lines[1] and lines[1].endswith("2.50x") and "gumbel-jacobi window 4" in lines[1]


@pytest.mark.parametrize(("two", "label"), [(1.0, "gumbel-jacobi window 2"), (2.0, "plain")])
def test_a_toy_model_is_measured(two: float, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "pass_times", lambda *_, **__: {1: 1.0, 2: two})
    row = measure(Model(name="toy", target=tiny_target()), "toy", steps=3, rounds=2)
    assert row.method.label == label and row.engine == "eager" and row.plain_ms > 0 and row.chosen_ms > 0
