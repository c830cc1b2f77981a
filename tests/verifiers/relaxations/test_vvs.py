"""Verification skipping: codes that are not tested follow the drafter, the others the target."""

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.methods.registry import METHODS, build_decoder
from lantern.verifiers.relaxations.vvs import Vvs
from tests.proof.pictures import DISTRIBUTION, SMALL, distance
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target
from tests.verifiers.relaxations.test_bounded import random_distribution

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1))
KEYS = [(3, 0), (3, 1)]


def decode(tree: str, sampling: Sampling, **settings: int) -> Generation:
    method = METHODS["vvs"].with_options(tree=tree, **settings)
    decoder = build_decoder(method, TARGET, sampling=sampling, drafter_module=tiny_eagle(TARGET))
    return decoder.generate(CONDITION, keys=KEYS)


def test_r_is_q_above_the_depth_and_p_below_it() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.stack([random_distribution(9, generator) for _ in range(3)]) for _ in range(2))
    found = Vvs(skip=2).relax(p.log(), q.log(), depths=torch.tensor([0, 1, 2]), levels=4)
    assert torch.equal(found.log_r[:2], q[:2].log()) and torch.equal(found.log_r[2], p[2].log())
    spent = [float(torch.maximum(a - b, torch.zeros(9)).sum()) for a, b in zip(p, q, strict=True)]
    assert found.total_variation.tolist() == pytest.approx([spent[0], spent[1], 0.0], abs=1e-6)
    assert min(spent) > 0.1


@pytest.mark.parametrize("sampling", [Sampling(guidance=3), Sampling(guidance=1, temperature=0)])
def test_without_skipping_codes_are_those_of_plain_decoding(sampling: Sampling) -> None:
    made = decode("spine_2_4_2", sampling, skip=0)
    expected = build_decoder("plain", TARGET, sampling=sampling).generate(CONDITION, keys=KEYS)
    assert torch.equal(made.codes, expected.codes) and (made.total_variation == 0).all()


def test_at_temperature_0_all_codes_are_tested() -> None:
    made = decode("spine_1_4_2", greedy := Sampling(guidance=1, temperature=0))
    assert torch.equal(made.codes, build_decoder("plain", TARGET, sampling=greedy).generate(CONDITION, keys=KEYS).codes)


@pytest.mark.parametrize("skip", [1, 2])
def test_codes_that_are_not_tested_are_always_accepted(skip: int) -> None:
    made = decode(f"spine_{skip}_4_2", Sampling(guidance=3), skip=skip)
    assert torch.equal(made.accepted[:, :skip], made.reached[:, :skip]) and (made.accepted[:, :skip] > 0).all()
    assert (made.accepted[:, skip] < made.reached[:, skip]).all()
    assert (made.total_variation > 0).all()


@torch.no_grad()
def test_the_reported_cost_is_that_of_the_distribution_of_pictures() -> None:
    """Pictures of 2 x 2 codes out of 5 are farther from the target's distribution than chance, within the cost."""
    count = 10_000
    condition = select(tiny_condition((3,)), [0] * count)
    method = METHODS["vvs"].with_options(tree="spine_1_2_1")
    decoder = build_decoder(method, SMALL, sampling=DISTRIBUTION, drafter_module=tiny_eagle(SMALL))
    made = decoder.generate(condition, keys=[(3, i) for i in range(count)])
    found, chance = distance(made.codes)
    assert chance * 1.5 < found < float(made.total_variation.mean()) + chance


def test_a_number_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="skip is 33, wanted a number of codes from 0"):
        Vvs(skip=33)
