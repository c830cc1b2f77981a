"""The bounded relaxation in C++: bits of the torch form, and the bound on the total variation at every token."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import rounded_log_softmax
from lantern.engines.cpu.engine import RelaxArgs
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.neighbours import proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Relaxed

# Normalizes scores of p and q and moves rows of p.
MOVE = """
#include "relaxation.h"
extern "C" void move(int rows, int vocab, const RelaxArgs *rule, float *p, float *q, float *spent, float *distance) {
    Relaxer relaxer(vocab);
    for (int i = 0; i < rows; i++, p += vocab, q += vocab) {
        relaxer.normalize(p);
        relaxer.normalize(q);
        relaxer.relax(*rule, p, q);
        spent[i] = float(relaxer.spent), distance[i] = float(relaxer.distance);
    }
}
"""
VOCAB, ROWS = 512, 24
CODEBOOK = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1))
TABLE = proximity_table(CODEBOOK, 60)
DISTANCES = proximity_distances(CODEBOOK, TABLE)
RULES = [
    Bounded(TABLE, distances=DISTANCES),
    Bounded(TABLE, k=60, delta=0.01, cap=1e6, rounds=3, width=VOCAB, distances=DISTANCES),
    Bounded(TABLE, k=7, delta=1, cap=1.5, rounds=1, width=3),
    Bounded(TABLE, k=0),
    Bounded(TABLE, delta=0.0, distances=DISTANCES),
]


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


def moved(mover: ctypes.CDLL, rule: Bounded, p: Tensor, q: Tensor) -> Relaxed:
    p, q, (spent, distance) = p.clone(), q.clone(), torch.zeros(2, ROWS)
    places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (p, q, spent, distance))
    mover.move(ROWS, VOCAB, ctypes.byref(RelaxArgs.of(rule)), *places)
    return Relaxed(p, spent, None if rule.distances is None else distance)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"k={rule.k}, delta={rule.delta}")
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 20.0])
def test_bits_of_torch_and_certificate(mover: ctypes.CDLL, rule: Bounded, spread: float) -> None:
    largest = 0.0
    for seed in range(20):
        p, q = scores(spread, seed)
        log_p, log_q = rounded_log_softmax(p), rounded_log_softmax(q)
        expected = rule.relax(log_p, log_q, depths=torch.zeros(ROWS, dtype=torch.long), levels=1)
        found = moved(mover, rule, p, q)
        assert torch.equal(found.log_r, expected.log_r)
        assert torch.equal(found.total_variation, expected.total_variation)
        if expected.latent_distance is not None and found.latent_distance is not None:
            assert torch.equal(found.latent_distance, expected.latent_distance)
        # of the numbers that tokens are sampled from
        realised = (found.log_r.double().exp() - log_p.double().exp()).abs().sum(1) / 2
        assert (found.total_variation <= rule.delta).all()
        assert (realised - found.total_variation.double()).abs().max() < 1e-7
        largest = max(largest, float(found.total_variation.max()))
    assert (largest > 0.001) == (rule.k > 0 and rule.delta > 0)


def test_rounded_log_softmax_sums_to_one() -> None:
    p, _ = scores(3.0, 0)
    assert (rounded_log_softmax(p).double().exp().sum(1) - 1).abs().max() < 1e-6
    assert (rounded_log_softmax(p) - p.log_softmax(-1)).nan_to_num().abs().max() < 1e-5
