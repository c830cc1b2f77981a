"""T(n): measuring, remembering, and the window that follows from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.core.io import write_json
from lantern.core.types import TargetDefaults
from lantern.engines import pass_times as timing
from lantern.engines.engine import EAGER, EagerEngine, WideEngine
from lantern.engines.pass_times import NODES, best_window, measure, pass_times, time_of
from tests.tiny import tiny_target


class Slow(TargetDefaults):
    """A target whose clock advances by 10 + n ms with every pass over n tokens; other programs take part of the
    time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tiny_target(block_size=64)
        self.config, self.tok_embeddings, self.now, self.passes = target.config, target.tok_embeddings, 0.0, list[int]()
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def __call__(self, inputs: torch.Tensor, positions: torch.Tensor, mask: Any, **where: Any) -> None:
        assert inputs.shape[:2] == positions.shape == mask.shape[:2] and inputs.shape[0] == 2
        self.passes.append(inputs.shape[1])
        self.now += (10 + inputs.shape[1] + (5 if len(self.passes) < 6 else 0)) / 1e3


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "WARM_PASSES", 0)


def test_minima_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    found = measure(slow, budget=1.0)
    assert found == {n: pytest.approx((10 + n) / 1e3) for n in NODES}
    assert slow.now < 1.05


def test_three_sizes_are_measured_whatever_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    assert list(measure(slow, budget=0.0)) == [1, 2, 4]
    assert slow.passes == [1, 1, 2, 4]


def test_slower_first_passes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    monkeypatch.setattr(timing, "WARM_PASSES", 2)
    assert list(measure(slow, budget=0.0)) == [1, 2, 4]
    assert slow.passes == [1, 1, 1, 2, 2, 4, 4, 1, 2, 4]
    monkeypatch.setattr(timing, "WARM_BUDGET", 0.0)
    slow.passes.clear()
    measure(slow, budget=0.0)
    assert slow.passes == [1, 1, 2, 4]


def test_real_passes_are_timed() -> None:
    found = measure(tiny_target(), budget=0.01)  # 16 tokens
    assert {1, 2, 4} <= set(found) <= set(NODES) and min(found.values()) > 0


def test_small_pictures_have_short_passes() -> None:
    assert list(measure(tiny_target(block_size=4), budget=0.01)) == [1, 2, 4]


def test_times_are_measured_once_for_a_shape_dtype_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(timing, "measure", lambda target, **how: measured.append(target) or {1: 1.0, 2: 1.5})
    first, same, other = tiny_target(0), tiny_target(1), tiny_target(dim=48, n_head=2)
    times = pass_times(EAGER, first)
    assert times == {1: 1.0, 2: 1.5} == pass_times(EagerEngine(reason="other"), same)
    assert measured == [first]
    for engine, target in ((EAGER, other), (EAGER, first.bfloat16()), (WideEngine(), same)):
        pass_times(engine, target)
    assert len(measured) == 4


BUSY = {"seconds": {"1": 0.0011, "2": 0.489, "4": 0.499}}  # another program ran during the longer passes


@pytest.mark.parametrize(
    "record", [{}, {"seconds": {"1": -1, "2": 1}}, {"seconds": {"1": 1}}, {"seconds": ["x"]}, BUSY]
)
def test_a_damaged_record_is_measured_again(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(timing, "measure", lambda target, **how: {1: 1.0, 2: 1.5})
    write_json(timing._path(EAGER, target, 2), record)
    assert pass_times(EAGER, target) == {1: 1.0, 2: 1.5} == pass_times(EAGER, target)


def test_times_between_and_past_measured_sizes_are_linear() -> None:
    times = {1: 1.0, 2: 2.0, 4: 3.0}
    assert [time_of(times, n) for n in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]


def test_the_window_is_long_where_passes_cost_the_same_and_short_where_tokens_do() -> None:
    assert best_window(dict.fromkeys(NODES, 1.0)) == 16
    assert best_window({n: float(n) for n in NODES}) == 2
    assert best_window({1: 1.0, 2: 1.02, 4: 1.05}) == 4  # no longer than what was measured
    assert best_window({1: 1.0, 2: 1.1, 4: 1.2}, {2: 1.5, 3: 1.9, 4: 2.0}) == 4


def test_times_that_are_not_steady_are_measured_again_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target, trials = tiny_target(), iter([{1: 9.0, 2: 1.0}, {1: 1.0, 2: 1.5}])
    monkeypatch.setattr(timing, "measure", lambda *_, **__: next(trials))
    assert pass_times(EAGER, target) == {1: 1.0, 2: 1.5} == pass_times(EAGER, target)
    busy = tiny_target(dim=48, n_head=2)
    for times in ({1: 9.0, 2: 1.0}, {1: 1.0, 2: 5.0}):
        count = list[int]()
        monkeypatch.setattr(timing, "measure", lambda *_, count=count, times=times, **__: count.append(1) or times)
        for calls in (1, 2):
            assert pass_times(EAGER, busy) == times and len(count) == 3 * calls
