"""VADUSA: Medusa heads without randomness, accepted if among several samples of the target."""

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.drafters.heads.medusa import MedusaDrafter
from lantern.methods.registry import METHODS, build_decoder
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.tolerance import Tolerance
from tests.tiny import select, tiny_condition, tiny_target
from tests.tiny_parts import tiny_parts

TARGET = tiny_target(block_size=4, vocab_size=5)
PICTURES = 6000


def made(name: str, **options: object) -> Generation:
    method = METHODS[name].with_options(**options)
    parts = build_decoder(method, TARGET, sampling=Sampling(guidance=2), add_ons=tiny_parts(TARGET))
    condition = select(tiny_condition((3,)), [0] * PICTURES)
    return parts.generate(condition, keys=[(0, i) for i in range(PICTURES)])


def pairs(generation: Generation) -> torch.Tensor:
    """Frequencies of neighbouring codes."""
    codes = generation.codes
    found = [torch.bincount(codes[:, j] * 5 + codes[:, j + 1], minlength=25) / PICTURES for j in range(3)]
    return torch.stack(found)


def test_vadusa_is_medusa_heads_with_tolerance() -> None:
    parts = build_decoder("vadusa", TARGET, sampling=Sampling(), add_ons=tiny_parts(TARGET))
    assert isinstance(parts.drafter, MedusaDrafter) and parts.drafter.mode == "point"
    assert isinstance(parts.verifier, RejectionVerifier) and isinstance(parts.verifier.relaxation, Tolerance)
    assert parts.verifier.relaxation.samples == 2
    assert not parts.method.exact


def test_one_sample_costs_nothing_and_matches_plain_decoding() -> None:
    one = made("vadusa", tree="chain_2", samples=1)
    assert one.total_variation.abs().max() < 1e-5 and one.relaxed.sum() == 0
    assert ((pairs(made("plain")) - pairs(one)).abs().sum(1) / 2).max() < 0.09  # sampling error alone is about 0.05


def test_more_samples_accept_more_at_a_higher_cost() -> None:
    found = [made("vadusa", tree="chain_2", samples=samples) for samples in (1, 2, 4)]
    passes, prices = ([float(getattr(g, name).float().mean()) for g in found] for name in ("passes", "total_variation"))
    assert passes == sorted(passes, reverse=True) and prices == sorted(prices)
    assert passes[2] < passes[0] and prices[1] > 0.01 and float(found[2].relaxed.sum()) > 0


def test_missing_heads_are_named() -> None:
    with pytest.raises(ValueError, match='"vadusa" needs the trained part "medusa"'):
        build_decoder("vadusa", TARGET, sampling=Sampling())
