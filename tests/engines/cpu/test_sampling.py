"""Sampling in C++: the tokens that torch samples from the same logits and noise, in the same order."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.engines.cpu.target import sampler_of

NOISE = Noise([(3, 0), (3, 1)], positions=9, vocab_size=2048)
PLACES = torch.tensor([[0, 4, 8, 4, 8], [1, 5, 8, 8, 2]])
DISTRIBUTIONS = [
    Sampling(guidance=7.5),
    Sampling(guidance=1.0, temperature=0.3),
    Sampling(guidance=3.0, top_k=1),
    Sampling(guidance=3.0, top_k=100, temperature=1.7),
    Sampling(guidance=3.0, top_k=2047),
    Sampling(guidance=3.0, top_k=2**40),
    Sampling(guidance=3.0, guidance_interval=3),
    Sampling(guidance=3.0, guidance_interval=2**40, top_k=7),
]


def logits(sampling: Sampling) -> Tensor:
    torch.manual_seed(1)
    found = 4 * torch.randn(2, sampling.rows, 5, 2048)
    found[0, :, 1] = found[0, :, 1].round()  # many are equal, also to the k-th
    found[1, :, 2, ::2] = -0.0
    found[1, :, 2, 1::2] = 0.0
    return found


def by_torch(sampling: Sampling, noise: Any, given: Tensor, purpose: int = Purpose.TARGET) -> Tensor:
    return sampling.scores(given, PLACES) + noise.gumbel(PLACES, purpose)


@pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.DRAFT])
def test_best_tokens_equal_torch(sampling: Sampling, purpose: int) -> None:
    given, best = logits(sampling), sampler_of(sampling, NOISE)
    expected = by_torch(sampling, NOISE, given, purpose)
    assert torch.equal(best(given, PLACES, purpose=purpose)[..., 0], expected.argmax(-1))
    found = best(given, PLACES, width=6, purpose=purpose)
    assert all(len(set(row)) == 6 for row in found.flatten(0, 1).tolist())
    assert torch.equal(expected.gather(-1, found), expected.topk(6, dim=-1).values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lowest_index_wins_ties_without_noise(temperature: float) -> None:
    sampling = Sampling(guidance=1.0, temperature=temperature)
    best = sampler_of(sampling, Noise([(0, 0), (0, 1)], positions=9, vocab_size=2048, is_silent=True))
    given = torch.zeros(2, 1, 5, 2048)
    given[..., [70, 900, 2000]] = 2.0
    assert best is not None and best(given, PLACES, width=4).unique(dim=1).tolist() == [[[70, 900, 2000, 0]]] * 2


def test_views_are_sampled_and_top_p_is_left_to_torch() -> None:
    wide, best = logits(DISTRIBUTIONS[0]), sampler_of(DISTRIBUTIONS[0], NOISE)
    expected = by_torch(DISTRIBUTIONS[0], NOISE, wide).argmax(-1)
    assert best is not None and torch.equal(best(wide[:, :, :3], PLACES[:, :3])[..., 0], expected[:, :3])
    assert sampler_of(Sampling(top_p=0.9), NOISE) is None


def test_infinite_logits_are_not_sampled_and_nan_affects_only_its_row() -> None:
    given, best = logits(DISTRIBUTIONS[3]), sampler_of(DISTRIBUTIONS[3], NOISE)
    given[0, 0, 0, 5:] = -torch.inf
    given[1, 0, 1, 7] = torch.nan
    expected = by_torch(DISTRIBUTIONS[3], NOISE, given).argmax(-1)
    found = best(given, PLACES)[..., 0]
    assert found[0, 0] < 5
    expected[1, 1] = found[1, 1]  # reported as not finite
    assert torch.equal(found, expected)
