"""T(n): measuring, remembering, and the window that follows from it."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern.core.io import write_json
from lantern.core.types import Target
from lantern.engines import pass_times as timing
from lantern.engines.engine import EAGER, EagerEngine, WideEngine
from lantern.engines.pass_times import NODES, Chain, best_window, measure, pass_times, time_of
from lantern.generation.choice import choose
from tests.tiny import tiny_target


class Slow(Target):
    """A target whose clock advances by 10 + n ms with every pass over n tokens, times the `load` at that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[float], float] = lambda now: 1.0) -> None:
        target = tiny_target(block_size=64)
        self.config, self.tok_embeddings, self.now, self.passes = target.config, target.tok_embeddings, 0.0, list[int]()
        self.load, self.parameters = load, target.parameters
        for clock in ("perf_counter", "process_time"):
            monkeypatch.setattr(timing.time, clock, lambda: self.now)

    def __call__(self, inputs: torch.Tensor, positions: torch.Tensor, mask: Any, **where: Any) -> None:
        assert inputs.shape[:2] == positions.shape == mask.shape[:2] and inputs.shape[0] == 2
        self.passes.append(inputs.shape[1])
        idle = (10 + inputs.shape[1]) / 1e3
        self.now += idle * self.load(self.now + idle)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "WARM_PASSES", 0)


def test_an_idle_machine_needs_six_rounds_and_large_models_have_three_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    assert measure(slow) == ({n: pytest.approx((10 + n) / 1e3) for n in NODES}, True)
    run = [1] * 3  # 11 ms each
    assert slow.passes == [1, *[2, 4, 8, 16, *run] * 7]
    monkeypatch.setattr(timing, "LARGE", 1)
    slow.passes.clear()
    times, are_certain = measure(slow, patience=0.0)
    assert list(times) == [1, 2, 4] and are_certain
    assert slow.passes == [1, *[2, 4, *run] * 7]


def test_slower_first_passes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    monkeypatch.setattr(timing, "WARM_PASSES", 2)
    measure(slow)
    assert slow.passes[:9] == [1, 1, 1, 2, 2, 4, 4, 2, 4]
    monkeypatch.setattr(timing, "WARM_BUDGET", 0.0)
    slow.passes.clear()
    measure(slow)
    assert slow.passes[:3] == [1, 2, 4]


TOKENS = {2: 1.5, 4: 2.4, 8: 3.4, 16: 5.5}  # by which 16 is 12 % faster than 8


def changing(seed: int) -> Callable[[float], float]:
    """Other programs take up to three quarters of the machine, more or less from second to second, and pause passes."""
    pauses = random.Random(seed)

    def load(now: float) -> float:
        return 2.5 + 1.5 * math.sin(2 * now + seed) + (4.0 if pauses.random() < 0.1 else 0.0)

    return load


def test_the_choice_is_the_same_under_changing_load(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: Any = Slow(monkeypatch)
    wanted = choose(measure(idle)[0], TOKENS).settings["window"]
    for seed in range(10):
        for patience in (timing.PATIENCE, 30.0):
            busy: Any = Slow(monkeypatch, changing(seed))
            found, are_certain = measure(busy, patience=patience)
            if patience > timing.PATIENCE:
                right = {n: pytest.approx((10 + n) / 11, rel=0.06) for n in NODES}
                assert {n: found[n] / found[1] for n in found} == right and are_certain
            assert choose(found, TOKENS).settings["window"] == wanted, (seed, patience)


def test_times_that_stay_uncertain_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = random.Random(0)
    slow: Any = Slow(monkeypatch, lambda now: chaos.uniform(1, 9))
    assert not measure(slow, patience=0.5)[1] and best_window({1: 1.0}) == 2
    target, uncertain = tiny_target(), {1: 1.0, 2: 1.5}
    monkeypatch.setattr(timing, "measure", lambda target, **how: (uncertain, False))
    assert pass_times(EAGER, target) == uncertain == timing._KEPT[timing._path(EAGER, target, 2)]
    assert not timing._path(EAGER, target, 2).exists()


def test_two_tokens_are_never_faster_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow(monkeypatch)
    slow.load = lambda now: 0.75 if slow.passes[-1] == 2 else 0.9 if slow.passes[-1] == 4 else 1.0
    found, are_certain = measure(slow)
    assert list(found) == [1, 4, 8, 16] and found[4] == pytest.approx(0.0126) and are_certain
    slow.load = lambda now: 0.9 if slow.passes[-1] == 2 else 1.0
    found, are_certain = measure(slow)
    assert list(found) == [*NODES] and found[2] == found[1] == pytest.approx(0.011) and are_certain


def test_real_passes_are_timed_and_a_chain_scores_its_nodes_as_alone() -> None:
    target = tiny_target()
    found, _ = measure(target, patience=0.0)  # 16 tokens
    assert 1 in found and set(found) <= set(NODES) and min(found.values()) > 0
    with torch.no_grad():
        chain = Chain(target, 2, 4, is_random=True)
        for node in range(4):
            whole, alone = chain.run(target).logits, chain.run_alone(target, node).logits
            assert torch.allclose(alone[:, 0], whole[:, node], atol=1e-4)
    assert set(measure(tiny_target(block_size=4), patience=0.0)[0]) <= {1, 2, 4}  # no more than the tokens of a picture


def test_times_are_measured_once_for_a_shape_dtype_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(timing, "measure", lambda target, **how: (measured.append(target) or {1: 1.0, 2: 1.5}, True))
    first, same, other = tiny_target(0), tiny_target(1), tiny_target(dim=48, n_head=2)
    times = pass_times(EAGER, first)
    assert times == {1: 1.0, 2: 1.5} == pass_times(EagerEngine(reason="other"), same)
    assert measured == [first]
    for engine, target in ((EAGER, other), (EAGER, first.bfloat16()), (WideEngine(), same)):
        pass_times(engine, target)
    assert len(measured) == 4


BUSY = {"seconds": {"1": 0.0011, "2": 0.489, "4": 0.499}}  # another program ran during the longer passes


@pytest.mark.parametrize(
    "record",
    [
        *({}, {"seconds": {"1": -1, "2": 1}}, {"seconds": {"1": 1}}, {"seconds": ["x"]}, BUSY),
        *({"seconds": {"2": 1, "4": 1}}, {"seconds": {"0": 1, "1": 1}}, {"seconds": {"1": 1, "2": 10**400}}),
    ],
)
def test_a_damaged_record_is_measured_again(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(timing, "measure", lambda target, **how: ({1: 1.0, 2: 1.5}, True))
    write_json(timing._path(EAGER, target, 2), record)
    assert pass_times(EAGER, target) == {1: 1.0, 2: 1.5} == pass_times(EAGER, target)


def test_times_are_linear_between_sizes_and_give_the_window() -> None:
    times = {1: 1.0, 2: 2.0, 4: 3.0}
    assert [time_of(times, n) for n in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]
    assert best_window(dict.fromkeys(NODES, 1.0)) == 16
    assert best_window({n: float(n) for n in NODES}) == 2
    assert best_window({}) == best_window({1: 1.0}) == 2
    assert best_window({1: 1.0, 2: 1.02, 4: 1.05}) == 4  # no longer than what was measured
    assert best_window({1: 1.0, 2: 1.1, 4: 1.2}, {2: 1.5, 3: 1.9, 4: 2.2}) == 4
    assert best_window({1: 1.0, 2: 1.1, 4: 1.2}, {2: 1.5, 3: 1.9, 4: 2.0}) == 3  # 1 % slower, and shorter


def test_times_that_are_not_steady_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for times in ({1: 9.0, 2: 1.0}, {1: 1.0, 2: 5.0}, {1: 1.0, 2: 0.91}, {1: 1.0}):
        count, found = list[int](), (times, True)
        monkeypatch.setattr(timing, "measure", lambda *_, count=count, found=found, **__: count.append(1) or found)
        for calls in (1, 2):
            assert pass_times(EAGER, tiny_target()) == times and len(count) == calls


def test_passes_of_graphs_are_timed_as_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = list[int]()

    def capture(run: Callable[[], None]) -> tuple[Any, None]:
        before = len(target.passes)
        run()
        captured.append(target.passes[-1])
        assert len(target.passes) == before + 1 > timing.WARM_PASSES
        return SimpleNamespace(replay=run), None

    monkeypatch.setattr("lantern.engines.cuda.graphs.capture", capture)
    target = Slow(monkeypatch)
    times, _ = measure(target, is_replayed=True)
    assert captured == list(NODES) and times == pytest.approx(measure(Slow(monkeypatch))[0])
