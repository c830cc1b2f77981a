"""Sampling in C++: the tokens that torch samples from the same logits and noise; and the bits of the mixture."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Purpose, Sampling, rounded_log_softmax
from lantern.engines.cpu.target import CpuTarget
from lantern.verifiers.relaxations.distributions import Mixture

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
    found[1, :, 3] -= 200
    return found


def sampler_of(sampling: Sampling, noise: Any) -> Any:
    return CpuTarget.__new__(CpuTarget).sampler(sampling, noise)


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


# Normalizes scores of p and q and moves rows of p.
MOVE = """
#include "mixture.h"
extern "C" void move(int rows, int vocab, double delta, double cap, float *p, float *q, float *spent) {
    Mixture mixture(vocab);
    for (int i = 0; i < rows; i++, p += vocab, q += vocab) {
        mixture.normalize(p);
        mixture.normalize(q);
        spent[i] = mixture.relax(delta, cap, p, q);
    }
}
"""
VOCAB, ROWS = 512, 24
RULES = [Mixture(), Mixture(0.01), Mixture(1), Mixture(0.3, cap=2), Mixture(0.0), Mixture(0.5, cap=1)]


def scores(spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of p and q: q is near p in some rows; some tokens are masked, as by top-k, and some are equal."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(ROWS, VOCAB, generator=generator) * spread
    q = torch.where(torch.arange(ROWS)[:, None] % 2 == 0, p, 0.0)
    q = q + torch.randn(ROWS, VOCAB, generator=generator) * spread * torch.rand(ROWS, 1, generator=generator)
    p[::3, 100:400] = -torch.inf
    q[1::4, :200] = -torch.inf
    q[2] = 0.0
    q[4] = torch.full((VOCAB,), -torch.inf).index_fill(0, p[4].topk(2).indices[1:], 0.0)
    p[6, ::2], q[6, ::2] = p[6, 1::2], q[6, 1::2]
    return p, q


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"delta={rule.delta}, cap={rule.cap}")
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 20.0])
def test_a_mixture_has_the_bits_of_torch_and_its_bound_on_the_total_variation(
    compiled: Callable[..., ctypes.CDLL], rule: Mixture, spread: float
) -> None:
    move = compiled(MOVE, "-O0").move
    largest = 0.0
    for seed in range(10):
        p, q = scores(spread, seed)
        log_p, log_q = rounded_log_softmax(p), rounded_log_softmax(q)
        expected = rule.relax(log_p, log_q, depths=torch.zeros(ROWS, dtype=torch.long), levels=1)
        spent = torch.zeros(ROWS)
        places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (p, q, spent))
        move(ROWS, VOCAB, ctypes.c_double(rule.delta), ctypes.c_double(rule.cap), *places)  # p becomes log r
        assert torch.equal(p, expected.log_r) and torch.equal(spent, expected.total_variation)
        # of the numbers that tokens are sampled from, whose logarithms are rounded to fp32: 2^-20 of each, half of that
        realised = (p.double().exp() - log_p.double().exp()).abs().sum(1) / 2
        assert (spent <= rule.delta).all() and (realised - spent.double()).abs().max() < 2.0**-21
        largest = max(largest, float(spent.max()))
    assert (largest > 0.001) == (rule.delta > 0 and rule.cap > 1)
