import pytest
import torch

from lantern.drafters.policies.eagle2 import Eagle2, PredictableEagle2
from tests.drafters.policies.layers import SIZE, layer, pool


def test_values_are_log_q_or_log_probabilities_to_match() -> None:
    given = layer()
    assert Eagle2("q").chances(given, ())[0] is given.log_q
    assert Eagle2("match").chances(given, ())[0] is given.match
    with pytest.raises(ValueError, match='value is "p"'):
        Eagle2("p")


def test_predictable_form_does_not_read_samples() -> None:
    policy = PredictableEagle2()
    given = layer(log_q=None, match=None)
    chances, _ = policy.chances(given, policy.begin(SIZE))
    assert chances.shape == (2, 3, 4) and (chances.exp().sum(-1) <= 1.0).all()
    assert (chances.diff(dim=-1) <= 0).all()


def test_peaked_distributions_favour_the_first_child() -> None:
    policy = PredictableEagle2()
    state = policy.begin(SIZE)
    peaked, flat = (policy.chances(layer(collision=torch.full((2, 3), c)), state)[0] for c in (1.0, 0.0))
    assert torch.equal(peaked[..., 0], torch.zeros(2, 3)) and (peaked[..., 1:] == -torch.inf).all()
    assert torch.allclose(flat[0, 0].exp(), torch.tensor([0.424, 0.115, 0.065, 0.055]))


def test_preferred_size_is_limited_by_the_budget() -> None:
    size = Eagle2().preferred_size(pool([[0.5, 0.2, 0.1, 0.0]], [1, 1, 2, 2], deepest=2, most=2), ())
    assert size.nodes.tolist() == [2] and size.depth.tolist() == [3]
