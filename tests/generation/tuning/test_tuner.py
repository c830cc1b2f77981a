"""The choice of a method from given costs and acceptance."""

import dataclasses
from collections.abc import Sequence

import pytest

from lantern.core.sampling import Sampling
from lantern.drafters.trees.static import StaticTree, named
from lantern.generation.requests import Request
from lantern.generation.tuning import measure
from lantern.generation.tuning.candidates import Bounds
from lantern.generation.tuning.costs import Laps
from lantern.generation.tuning.measure import Acceptance, Run, Setup
from lantern.generation.tuning.solve import tokens_per_step
from lantern.generation.tuning.tuner import Candidate, Effort, Findings, Tuner, choose
from lantern.methods import Method
from lantern.models.folder import Model
from tests.tiny import tiny_eagle, tiny_target

TARGET = tiny_target()
MODEL = Model("toy", TARGET, drafter=tiny_eagle(TARGET))


def decide(
    monkeypatch: pytest.MonkeyPatch,
    rates: list[list[float]],
    *,
    verify_slope: float,
    draft: float,
    bounds: Bounds | None = None,
) -> Findings:
    """Tune "eagle1" with given instead of measured times and acceptance; real runs are as predicted."""

    def laps(nodes: int, depth: int, inner: int) -> Laps:
        verify, drafting = 1 + verify_slope * (nodes - 1), draft * depth
        return Laps(nodes, depth, inner, verify, drafting, verify + drafting + 0.1)

    def timed(setup: Setup, method: Method, trees: Sequence[StaticTree], **_: object) -> list[Laps]:
        return [laps(tree.max_nodes, tree.depth, tree.num_inner) for tree in trees]

    def run(setup: Setup, methods: Sequence[Method], *, batches: int) -> list[Run]:
        seconds = [Run(1.1, 1.0, 0.0)]
        for method in methods[1:]:
            tree = named(str(method.tree))
            tau = tokens_per_step(tree, rates)
            seconds.append(Run(laps(tree.max_nodes, tree.depth, tree.num_inner).step / tau, tau, 0.0))
        return seconds

    monkeypatch.setattr(measure, "time_plain", lambda setup, **_: laps(1, 0, 0))
    monkeypatch.setattr(measure, "time_trees", timed)
    monkeypatch.setattr(measure, "measure_acceptance", lambda *_, **__: Acceptance(rates, [], 0.0))
    monkeypatch.setattr(measure, "run_interleaved", run)
    setup = Setup(MODEL, Sampling(), [Request(prompt="a cat")])
    return Tuner(setup, Effort(), bounds or Bounds(), ["eagle1"]).run()


FLAT, GOOD = [[0.05] * 16] * 8, [[0.9, *[0.001] * 15]] * 8


@pytest.mark.parametrize(
    ("rates", "verify_slope", "draft", "chosen"),
    [
        ([[1 / 2048] * 16] * 8, 0.0, 0.0, None),  # a drafter of random weights
        (GOOD, 0.05, 0.02, "chain_8"),  # a good and cheap one
        (FLAT, 0.001, 0.3, "grown_16_1"),  # one whose ranks are equally good
        ([[0.6, 0.1, 0.1]] * 8, 1.0, 0.1, None),  # each node costs as much as a step
    ],
)
def test_the_choice_follows_from_rates_and_costs(
    monkeypatch: pytest.MonkeyPatch, rates: list[list[float]], verify_slope: float, draft: float, chosen: str | None
) -> None:
    found = decide(monkeypatch, rates, verify_slope=verify_slope, draft=draft)
    assert found.choice.method.tree == (named(chosen).spelling if chosen else None)
    assert found.choice.name == ("eagle1" if chosen else "plain")
    if chosen == "chain_8":
        speedups = [found.choice.as_dict(found.plain)[kind]["speedup"] for kind in ("predicted", "measured")]
        assert speedups[0] == pytest.approx(speedups[1], rel=1e-3) and speedups[0] > 3 and found.choice.run


def test_slow_candidates_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decide(monkeypatch, [[0.01] * 16] * 8, verify_slope=1.0, draft=1.0)
    assert found.candidates and all(candidate.run is None for candidate in found.candidates)


PLAIN = Candidate("plain", {}, Run(1.0, 1.0, 0.0), Run(1.0, 1.0, 0.0))
FAST = Candidate("lantern++", {"lambda_": 2.0}, Run(0.5, 2.0, 0.05), Run(0.5, 2.0, 0.08))


def test_the_measured_run_decides_not_the_prediction() -> None:
    slow = dataclasses.replace(FAST, run=Run(1.2, 2.0, 0.0))
    assert choose(PLAIN, [slow], Bounds(max_tv=0.5)) == PLAIN
    assert choose(PLAIN, [slow, FAST], Bounds(max_tv=0.5)) == FAST
    assert choose(PLAIN, [dataclasses.replace(FAST, run=None)], Bounds(max_tv=0.5)) == PLAIN


def test_a_run_that_breaks_the_bound_is_not_chosen() -> None:
    assert choose(PLAIN, [FAST], Bounds(max_tv=0.07)) == PLAIN
    assert choose(PLAIN, [FAST], Bounds(max_tv=0.09)) == FAST


def test_a_speedup_within_noise_is_not_chosen() -> None:
    assert choose(PLAIN, [dataclasses.replace(FAST, run=Run(0.99, 2.0, 0.0))], Bounds(max_tv=0.5)) == PLAIN
