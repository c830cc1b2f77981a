"""Acceptance rates from the steps of real generations."""

import numpy as np
import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.drafters.trees.static import grown
from lantern.generation.decoder import build_decoder
from lantern.generation.tuning.acceptance import Tally, probing_tree, rates_of
from lantern.generation.tuning.solve import tokens_per_step
from lantern.methods import METHODS
from tests.tiny import tiny_condition, tiny_eagle, tiny_target


@pytest.mark.parametrize("name", ["eagle1", "eagle1-rejection"])
def test_counts_equal_those_of_the_statistics(name: str) -> None:
    target = tiny_target()
    method = METHODS[name].with_options(tree="grown_20_4")
    parts = build_decoder(method, target, sampling=Sampling(guidance=3), drafter_module=tiny_eagle(target))
    tally = Tally(tokens=16, depth=4, width=16)
    made = parts.generate(tiny_condition((4, 2)), keys=[(0, 0), (0, 1)], callback=tally)
    tally.count()
    assert tally.taken.sum(1).tolist() == made.accepted.sum(0).tolist()
    assert tally.tested[:, 0].tolist() == made.reached.sum(0).tolist()
    assert (np.diff(tally.tested, axis=1) <= 0).all() and tally.taken.sum() > 0


def test_rates_predict_the_tokens_of_a_step() -> None:
    target = tiny_target()
    tree = grown(12, 3)
    method = METHODS["eagle1"].with_options(tree=tree.spelling)
    parts = build_decoder(method, target, sampling=Sampling(guidance=3), drafter_module=tiny_eagle(target))
    tally = Tally(tokens=16, depth=3, width=16)
    lengths: list[torch.Tensor] = []

    def watch(step: Step) -> None:
        tally(step)
        lengths.append(step.counts)

    for seed in range(12):
        made = parts.generate(
            tiny_condition((4,) * 8),
            keys=[(seed, i) for i in range(8)],
            callback=watch,
        )
    assert made.steps.min() >= 1
    tally.count()
    # past the end nothing counts, so the mean over steps falls short of what a step in the middle commits
    mean = float(torch.cat(lengths).float().mean())
    assert mean < tokens_per_step(tree, tally.rates()) < 1.6 * mean


def test_a_rate_counts_only_tested_nodes() -> None:
    tested = np.array([[100, 50, 10, 0]])
    taken = np.array([[40, 10, 5, 0]])
    [rates] = rates_of(taken, tested)
    hazards = [40 / 104, 10 / 54, 5 / 14]
    expected = [hazards[0], (1 - hazards[0]) * hazards[1], (1 - hazards[0]) * (1 - hazards[1]) * hazards[2]]
    # the third rank did better than the second: the two are pooled
    pooled = (expected[1] + expected[2]) / 2
    assert rates == pytest.approx([expected[0], pooled, pooled, 0])


def test_a_depth_never_reached_has_the_rates_of_the_one_above() -> None:
    rates = rates_of(np.array([[60, 10], [0, 0]]), np.array([[96, 36], [0, 0]]))
    assert rates[1] == pytest.approx(rates[0]) and rates[0][0] == pytest.approx(0.6)


def test_a_drafter_that_is_never_accepted_has_zero_rates() -> None:
    rates = rates_of(np.zeros((3, 16), dtype=int), np.full((3, 16), 50))
    assert np.allclose(rates, 0)


def test_the_probing_tree_follows_the_measured_rates() -> None:
    flat = probing_tree([], nodes=64, depth=8, width=16)
    assert flat.max_nodes == 64 and flat.shape().widths[0] == 16
    sure = probing_tree([[0.9, *[0.001] * 15]] * 8, nodes=64, depth=8, width=16)
    assert sure.depth == 8
    assert max(probing_tree([], nodes=64, depth=8, width=3).shape().widths) == 3
