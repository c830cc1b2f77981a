"""Verification skipping: tokens that are not tested follow the drafter, the others the target."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.verifiers.relaxations.vvs import Vvs
from tests.tiny_decoder import CONDITION, KEYS, plain_tokens, tiny_decoder
from tests.verifiers.relaxations.test_bounded import random_distribution


def decode(tree: str, sampling: Sampling, **settings: Any) -> Generation:
    return tiny_decoder("vvs", sampling=sampling, tree=tree, **settings).generate(CONDITION, keys=KEYS)


def test_r_is_q_above_the_depth_and_p_below_it() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.stack([random_distribution(9, generator) for _ in range(3)]) for _ in range(2))
    found = Vvs(skip=2).relax(p.log(), q.log(), depths=torch.tensor([0, 1, 2]), levels=4)
    assert torch.equal(found.log_r[:2], q[:2].log()) and torch.equal(found.log_r[2], p[2].log())
    spent = [float(torch.maximum(a - b, torch.zeros(9)).sum()) for a, b in zip(p, q, strict=True)]
    assert found.total_variation.tolist() == pytest.approx([spent[0], spent[1], 0.0], abs=1e-6)
    assert min(spent) > 0.1


@pytest.mark.parametrize("sampling", [Sampling(guidance=3), Sampling(guidance=1, temperature=0)])
def test_without_skipping_tokens_are_those_of_plain_decoding(sampling: Sampling) -> None:
    made = decode("spine_2_4_2", sampling, skip=0)
    assert torch.equal(made.tokens, plain_tokens(sampling=sampling)) and (made.total_variation == 0).all()


def test_at_temperature_0_all_tokens_are_tested() -> None:
    made = decode("spine_1_4_2", greedy := Sampling(guidance=1, temperature=0))
    assert torch.equal(made.tokens, plain_tokens(sampling=greedy))


@pytest.mark.parametrize("skip", [1, 2])
def test_tokens_that_are_not_tested_are_always_accepted(skip: int) -> None:
    made = decode(f"spine_{skip}_4_2", Sampling(guidance=3), skip=skip)
    assert torch.equal(made.accepted[:, :skip], made.reached[:, :skip]) and (made.accepted[:, :skip] > 0).all()
    assert (made.accepted[:, skip] < made.reached[:, skip]).all()
    assert (made.total_variation > 0).all()
