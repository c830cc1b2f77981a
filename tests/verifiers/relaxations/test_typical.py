"""Typical acceptance by hand."""

import math

import pytest
import torch

from lantern.verifiers.relaxations.rule import Trial
from lantern.verifiers.relaxations.typical import Typical

P = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
BAR = 0.3 * math.exp((P * P.log()).sum().item())  # alpha exp(-H)


@pytest.mark.parametrize(("epsilon", "bar"), [(1.0, BAR), (0.05, 0.05)])
def test_a_draft_is_accepted_above_the_lower_of_both_thresholds(epsilon: float, bar: float) -> None:
    rule = Typical(epsilon=epsilon)
    for token in range(4):
        point = torch.nn.functional.one_hot(torch.tensor([token]), 4).float()
        ruling = rule.judge(Trial(P, point, torch.tensor([token]), True))
        assert ruling.mass.item() == float(P[0, token] > bar)
        assert torch.equal(ruling.left, P)
