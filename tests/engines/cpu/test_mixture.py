"""The mixture in C++: bits of the torch form, and the bound on the total variation at every token."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import rounded_log_softmax
from lantern.verifiers.relaxations.distributions import Mixture

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


@pytest.fixture(scope="module")
def mover(compiled: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return compiled(MOVE)


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
def test_bits_of_torch_and_certificate(mover: ctypes.CDLL, rule: Mixture, spread: float) -> None:
    largest = 0.0
    for seed in range(20):
        p, q = scores(spread, seed)
        log_p, log_q = rounded_log_softmax(p), rounded_log_softmax(q)
        expected = rule.relax(log_p, log_q, depths=torch.zeros(ROWS, dtype=torch.long), levels=1)
        spent = torch.zeros(ROWS)
        places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (p, q, spent))
        mover.move(ROWS, VOCAB, ctypes.c_double(rule.delta), ctypes.c_double(rule.cap), *places)  # p becomes log r
        assert torch.equal(p, expected.log_r) and torch.equal(spent, expected.total_variation)
        # of the numbers that tokens are sampled from, whose logarithms are rounded to fp32: 2^-20 of each, half of that
        realised = (p.double().exp() - log_p.double().exp()).abs().sum(1) / 2
        assert (spent <= rule.delta).all() and (realised - spent.double()).abs().max() < 2.0**-21
        largest = max(largest, float(spent.max()))
    assert (largest > 0.001) == (rule.delta > 0 and rule.cap > 1)
