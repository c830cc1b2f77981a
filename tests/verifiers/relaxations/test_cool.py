"""COOL-SD as a distribution: it matches the published test, and its total variation has a closed form."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lantern.verifiers.relaxations.cool import Cool

TOKENS = 12


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(TOKENS, generator=generator, dtype=torch.float64) * 2).softmax(0)
    q = (p.log() + torch.randn(TOKENS, generator=generator, dtype=torch.float64)).softmax(0)
    if seed % 3 == 0:
        p[seed % TOKENS] = 0.0
    return p / p.sum(), q


def as_published(p: Tensor, q: Tensor, omega: float) -> Tensor:
    """Return the distribution of one draft accepted with f = min(1, omega p / q), else norm(max(p - q f, 0))."""
    taken = q * (omega * p / q).clamp(max=1.0)
    left = (p - taken).clamp(min=0) if omega < 1 else (p - q).clamp(min=0)
    return taken + (1 - taken.sum()) * left / left.sum()


@pytest.mark.parametrize("omega", [0.5, 1.0, 1.1, 2.0, 5.0])
def test_distribution_matches_the_published_test(omega: float) -> None:
    for seed in range(100):
        p, q = distributions(seed)
        rule = Cool(omega=omega, nu=0)
        found = rule.relax(p.log()[None], q.log()[None], depths=torch.zeros(1, dtype=torch.long), levels=5)
        r = found.log_r[0].exp()
        assert torch.allclose(r, as_published(p, q, omega), atol=1e-12)
        assert abs(float((r - p).abs().sum() / 2 - found.total_variation)) < 1e-12
        # One draft tested exactly against r is accepted as often as the published test accepts it.
        chance = (q * (max(omega, 1.0) * p / q).clamp(max=1.0)).sum()
        assert abs(float(torch.minimum(r, q).sum() - chance)) < 1e-12


def test_factors_anneal_with_mean_omega() -> None:
    factors = Cool(omega=1.1, nu=0.7).factors(5)
    assert sum(factors) / 5 == pytest.approx(1.1)
    assert [b / a for a, b in pairwise(factors)] == pytest.approx([math.exp(-0.7)] * 4)


def test_early_nodes_are_relaxed_more() -> None:
    p, q = distributions(1)
    rows = p.log().expand(3, -1), q.log().expand(3, -1)
    found = Cool(omega=1.5).relax(*rows, depths=torch.tensor([0, 1, 2]), levels=3)
    spent = found.total_variation.tolist()
    assert spent[0] > spent[1] > spent[2] == 0
    assert torch.equal(found.log_r[2], rows[0][2])


def test_latent_distance_is_an_upper_bound() -> None:
    codebook = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for seed in range(50):
        p, q = distributions(seed)
        rule = Cool(omega=2.0, nu=0, codebook=codebook)
        found = rule.relax(p.log()[None], q.log()[None], depths=torch.zeros(1, dtype=torch.long), levels=1)
        r = found.log_r[0].exp()
        gained, lost = (r - p).clamp(min=0), (p - r).clamp(min=0)
        mean = gained @ torch.cdist(codebook, codebook) @ lost / lost.sum()
        assert found.latent_distance is not None
        assert mean <= found.latent_distance[0] + 1e-9 <= 1.5 * mean + 2e-9
