"""VADUSA: Medusa heads without randomness, accepted if among several samples of the target."""

import pytest

from lantern.core.types import Generation
from lantern.drafters.heads.medusa import MedusaDrafter
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.tolerance import Tolerance
from tests.proof.pictures import DISTRIBUTION, SMALL, p_value, pictures
from tests.tiny_decoder import tiny_decoder


def made(samples: int) -> Generation:
    return pictures(tiny_decoder("vadusa", SMALL, DISTRIBUTION, tree="chain_2", samples=samples), 6000)


def test_vadusa_is_medusa_heads_with_tolerance() -> None:
    parts = tiny_decoder("vadusa")
    assert isinstance(parts.drafter, MedusaDrafter) and parts.drafter.mode == "point"
    assert isinstance(parts.verifier, RejectionVerifier) and isinstance(parts.verifier.relaxation, Tolerance)
    assert parts.verifier.relaxation.samples == 2
    assert not parts.method.exact


def test_one_sample_costs_nothing_and_matches_plain_decoding() -> None:
    one = made(1)
    assert one.total_variation.abs().max() < 1e-5 and one.relaxed.sum() == 0
    assert p_value(one.tokens) > 1e-4


def test_more_samples_accept_more_at_a_higher_cost() -> None:
    found = [made(samples) for samples in (1, 2, 4)]
    steps, costs = ([float(getattr(g, name).float().mean()) for g in found] for name in ("steps", "total_variation"))
    assert steps == sorted(steps, reverse=True) and costs == sorted(costs)
    assert steps[2] < steps[0] and costs[1] > 0.01 and float(found[2].relaxed.sum()) > 0


def test_missing_heads_are_named() -> None:
    with pytest.raises(ValueError, match='"vadusa" needs the trained part "medusa"'):
        tiny_decoder("vadusa", add_ons={})
