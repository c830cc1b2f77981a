"""Losses of drafters: their values at known distributions, and descent on them raises acceptance."""

import math

import pytest
import torch

from lantern.training.losses import Objective, acceptance, feature_regression

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.25, 0.25, 0.25, 0.25])


def test_acceptance_is_one_minus_total_variation_and_regression_linear_far() -> None:
    assert float(acceptance(P, Q.log())) == pytest.approx(1 - 0.5 * float((P - Q).abs().sum()))
    assert float(acceptance(P, P.log())) == pytest.approx(1.0)
    assert float(Objective(cross_entropy=0).of_distributions(P, Q.log())) == pytest.approx(-math.log(0.7))
    expected = torch.zeros(2, 4)
    output = torch.tensor([[0.5] * 4, [3.0] * 4])
    assert feature_regression(output, expected).tolist() == pytest.approx([0.125, 2.5])


def test_tokens_that_are_never_drafted_reduce_acceptance_alone() -> None:
    logits = torch.tensor([1.0, 0.5, -torch.inf, -torch.inf], requires_grad=True)
    log_q = logits.log_softmax(-1)
    q = log_q.exp().detach()
    share, entropy = float(acceptance(P, log_q).detach()), float(-(P[:2] * q[:2].log()).sum())
    assert share <= 0.8 + 1e-6
    objective = Objective(acceptance=2.0)
    expected = pytest.approx(-2 * math.log(share) + 0.1 * entropy)
    assert float(objective.of_distributions(P, log_q).detach()) == expected
    (grad,) = torch.autograd.grad(objective.of_distributions(P, logits.log_softmax(-1)), logits)
    assert torch.isfinite(grad).all() and grad[:2].abs().min() > 0
    assert torch.isfinite(objective.of_distributions(torch.tensor([1.0, 0.0]), torch.tensor([-torch.inf, 0.0])))


@pytest.mark.parametrize(
    "changes", [{"acceptance": 0.0, "cross_entropy": 0.0, "regression": 0.0}, {"fade": 0.0}, {"regression": -1}]
)
def test_invalid_objectives_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Objective(**changes)
