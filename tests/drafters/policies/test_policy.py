"""Properties of all policies: state sizes, the range of log probabilities, and traits."""

import pytest
import torch

from lantern.drafters.policies.c2t import C2T, C2TConfig
from lantern.drafters.policies.policy import (
    MAX_DEPTH,
    MAX_LOG,
    MIN_LOG,
    STOPPED,
    STOPPED_BELOW,
    TRAITS,
    match_chances,
    traits_of,
)
from lantern.drafters.policies.radar import Radar, RadarConfig
from lantern.methods import METHODS
from lantern.methods.parts import resolved
from tests.drafters.policies.layers import SIZE, layer

DRAFTERS = {name: method.made.drafter for name, method in METHODS.items() if method.made.calls("Growth")}
POLICIES = {name: resolved(drafter.named["policy"].path) for name, drafter in DRAFTERS.items() if drafter}
PARTS = {"c2t": C2T(C2TConfig()), "radar": Radar(RadarConfig(beam=4, hidden=8))}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_states_keep_their_sizes(name: str) -> None:
    policy = POLICIES[name](**({"part": PARTS[kind]} if (kind := name.removesuffix("-paper")) in PARTS else {}))
    state = policy.begin(SIZE)
    planned = policy.plan(state)
    shown = layer(0, log_q=None, match=None) if policy.is_predictable else layer(0)
    with torch.no_grad():
        chances, after = policy.chances(shown, planned)
    assert chances.shape == (2, 3, 4) and not chances.isnan().any()
    assert [x.shape for x in state] == [x.shape for x in planned] == [x.shape for x in after]


@pytest.mark.parametrize("network", [C2T(C2TConfig()), Radar(RadarConfig())])
def test_networks_are_small(network: torch.nn.Module) -> None:
    assert sum(p.numel() for p in network.parameters()) * 4 < 1 << 20


def test_open_paths_rank_above_stopped_ones_and_children_below_parents() -> None:
    assert MAX_DEPTH * MIN_LOG > STOPPED_BELOW > STOPPED
    deep = torch.tensor(MAX_DEPTH * STOPPED)
    assert deep + MAX_LOG < deep


def test_match_probability_without_noise_is_q() -> None:
    distribution = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert torch.allclose(match_chances(distribution, 1.0), distribution, atol=1e-6)
    assert match_chances(distribution, 2.0).amax() < distribution.amax() < match_chances(distribution, 0.5).amax()


def test_match_probability_matches_simulated_targets() -> None:
    """The target's sample is the arg-max of scores + noise, as `match_chances` assumes, over 200,000 targets."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, generator=generator)
    noise = -torch.rand(200_000, 6, generator=generator).log().neg().log()
    sampled = torch.bincount((scores + 0.7 * noise).argmax(1), minlength=6) / 200_000
    assert (sampled - match_chances(scores, 0.7).exp()).abs().max() < 0.005


def test_traits_have_the_order_of_their_names() -> None:
    given = layer(2)
    assert given.match is not None and given.log_q is not None
    traits = traits_of(given)
    assert traits.shape == (2, 3, 4, len(TRAITS))
    of = {name: traits[..., i] for i, name in enumerate(TRAITS)}
    assert torch.equal(of["match"], given.match) and torch.equal(of["log_q"], given.log_q)
    assert torch.equal(of["joint"], given.joint[..., None] + given.match)
    assert (of["depth"] == 3).all() and of["rank"][0, 0].tolist() == [0, 1, 2, 3]
    assert of["row"][:, 0, 0].tolist() == [0.25, 0.5] and of["column"][:, 0, 0].tolist() == [0.25, 0.25]
    assert torch.equal(of["up_right"][:, 2, 1], given.near[:, 2])
