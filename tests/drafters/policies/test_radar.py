import torch

from lantern.drafters.policies.policy import MIN_LOG, padded_beam
from lantern.drafters.policies.radar import Radar, RadarConfig, RadarPolicy
from tests.drafters.policies.layers import SIZE, layer


def network(inclined: float = 0.0) -> Radar:
    module = Radar(RadarConfig(beam=4, hidden=8))
    module.init_weights(torch.Generator().manual_seed(0))
    module.second.weight.data.zero_()
    module.second.bias.data.fill_(inclined)
    return module


def test_stopping_lasts_until_the_next_step() -> None:
    policy = RadarPolicy(network(-5.0))
    state = policy.plan(policy.begin(SIZE))
    given = layer(0)
    chances, state = policy.chances(given, state)
    assert chances is given.match and not state[2].any()  # the first depth is always drafted
    chances, state = policy.chances(layer(1), state)
    assert (chances == -torch.inf).all() and state[2].all()
    policy.part.second.bias.data.fill_(5.0)
    chances, state = policy.chances(layer(2), state)
    assert (chances == -torch.inf).all()
    assert not policy.plan(state)[2].any()


def test_continuing_leaves_probabilities_unchanged() -> None:
    policy, given = RadarPolicy(network(5.0)), layer(1)
    assert given.match is not None
    assert torch.equal(policy.chances(given, policy.begin(SIZE))[0], given.match)


def test_decision_depends_on_earlier_depths() -> None:
    module = Radar(RadarConfig(beam=4, hidden=8))
    module.init_weights(torch.Generator().manual_seed(0))
    beam, side = torch.full((1, 4), -1.0), torch.zeros(1, 4)
    empty = (torch.zeros(1, 8), torch.zeros(1, 8))
    first, memory = module(beam, side, empty)
    assert not torch.equal(module(beam, side, memory)[0], first)


def test_narrow_beams_are_padded_with_the_least_log_probability() -> None:
    beam = torch.tensor([[-3.0, -1.0]])
    assert padded_beam(beam, 3).tolist() == [[-1.0, -3.0, MIN_LOG]] and padded_beam(beam, 1).tolist() == [[-1.0]]
