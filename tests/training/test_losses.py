"""Losses of drafters: their values at known distributions, and descent on them raises acceptance."""

import math

import pytest
import torch

from lantern.training.losses import (
    Objective,
    acceptance,
    feature_regression,
    lk_alpha,
    lk_lambda,
    soft_cross_entropy,
)

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.25, 0.25, 0.25, 0.25])


def test_acceptance_is_one_minus_total_variation() -> None:
    assert float(acceptance(P, Q.log())) == pytest.approx(1 - 0.5 * float((P - Q).abs().sum()))
    assert float(acceptance(P, P.log())) == pytest.approx(1.0)
    assert float(lk_alpha(P, Q.log())) == pytest.approx(-math.log(0.7))


def test_lambda_moves_from_divergence_to_acceptance() -> None:
    divergence = float(sum(p * math.log(p / 0.25) for p in (0.5, 0.3, 0.2)))
    share = 0.9 * math.exp(-2.0 * 0.7)
    expected = share * divergence + (1 - share) * 0.3
    assert float(lk_lambda(P, Q.log(), scale=0.9, decay=2.0)) == pytest.approx(expected)
    assert float(lk_lambda(P, P.log(), scale=1.0)) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(lk_lambda(P, Q.log(), scale=1.0, decay=0.0), torch.tensor(divergence))
    chosen = Objective(form="lambda", kl_scale=0.9, kl_decay=2.0, acceptance=2.0, cross_entropy=0.0)
    assert float(chosen.of_distributions(P, Q.log())) == pytest.approx(2 * expected)


def test_tokens_that_are_never_drafted_reduce_acceptance_alone() -> None:
    logits = torch.tensor([1.0, 0.5, -torch.inf, -torch.inf], requires_grad=True)
    log_q = logits.log_softmax(-1)
    q = log_q.exp().detach()
    assert float(soft_cross_entropy(P, log_q).detach()) == pytest.approx(float(-(P[:2] * q[:2].log()).sum()))
    assert float(acceptance(P, log_q).detach()) <= 0.8 + 1e-6
    for form in ("alpha", "lambda"):
        (grad,) = torch.autograd.grad(Objective(form=form).of_distributions(P, logits.log_softmax(-1)), logits)
        assert torch.isfinite(grad).all() and grad[:2].abs().min() > 0
        apart = Objective(form=form).of_distributions(torch.tensor([1.0, 0.0]), torch.tensor([-torch.inf, 0.0]))
        assert torch.isfinite(apart)


def test_regression_is_linear_far_and_quadratic_near() -> None:
    expected = torch.zeros(2, 4)
    output = torch.tensor([[0.5] * 4, [3.0] * 4])
    assert feature_regression(output, expected).tolist() == pytest.approx([0.125, 2.5])


@pytest.mark.parametrize(
    "changes",
    [
        {"acceptance": 0.0, "cross_entropy": 0.0, "regression": 0.0},
        {"fade": 0.0},
        {"kl_scale": 2.0},
        {"regression": -1},
    ],
)
def test_invalid_objectives_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Objective(**changes)
