"""Times of plain decoding with different engines."""

import shutil
from statistics import median

import pytest

from lantern.core.sampling import Sampling
from lantern.engines.engine import EagerEngine, Engine, engine
from lantern.generation.generator import Generator
from lantern.generation.requests import Request
from lantern.generation.tuning import measure
from lantern.generation.tuning.measure import Setup, StepClock
from lantern.models.folder import Model
from tests.tiny import tiny_condition, tiny_target

SHAPE = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}


def setup_of(engine: Engine) -> Setup:
    return Setup(Model("toy", tiny_target(**SHAPE), engine=engine), Sampling(), [Request(prompt="a cat")])


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_pass_of_plain_decoding_is_timed_and_shorter_than_its_step(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_fused and shutil.which("g++") is None:
        pytest.skip("needs g++, with which fused passes are built")
    monkeypatch.setattr(Generator, "condition", lambda *_: tiny_condition((4,)))
    setup = setup_of(engine("cpu" if is_fused else "eager"))
    laps = measure.time_plain(setup, steps=16, rounds=2)
    assert (laps.nodes, laps.depth, laps.draft) == (1, 0, 0.0)
    assert 0 < laps.verify <= laps.step


def test_where_no_pass_is_seen_it_is_the_whole_step() -> None:
    clock = StepClock(setup_of(EagerEngine()), 16)
    clock.step = [0.5, 0.1, 0.3]
    assert clock.of_tree(1, 0, 0).verify == median(clock.step)
    clock.verify = [0.9, 0.2, 0.05, 0.1]
    assert clock.of_tree(1, 0, 0).verify == 0.1  # of the steps that were timed
