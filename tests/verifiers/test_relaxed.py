"""Exact verification of a relaxed distribution: tokens follow r, and the cost is TV(r, p)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Generation, Verifier
from lantern.drafters.trees.static import StaticTree
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.cool import Cool
from lantern.verifiers.relaxations.neighbours import proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed
from lantern.verifiers.relaxed import RelaxedVerifier
from tests.proof.worlds import GivenRows
from tests.tiny import tiny_condition
from tests.tiny_decoder import BLIND, SAMPLING, tiny_codebook, tiny_decoder
from tests.verifiers.toys import TOKENS, TREE, Toy, distance, draw_tree, outcome, spread_noise, target_distribution, toy

TOLERANCE = 0.015
FLAT = StaticTree(((0,), (1,)))
CODEBOOK = torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(1))
LINE = proximity_table(CODEBOOK, TOKENS - 1)
BOUNDED = Bounded(LINE, k=3, delta=0.3, distances=proximity_distances(CODEBOOK, LINE))
PAIRS = [
    (GumbelVerifier(), "gumbel"),
    (GumbelVerifier(), "point"),
    (RejectionVerifier(), "sampled"),
    (RejectionVerifier(), "iid"),
    (RejectionVerifier(), "point"),
]


class Halfway(Relaxation):
    """r = (p + q) / 2."""

    def relax(self, log_p: Tensor, log_q: Tensor, *, depths: Tensor, levels: int) -> Relaxed:
        return Relaxed(((log_p.exp() + log_q.exp()) / 2).log(), (log_p.exp() - log_q.exp()).abs().sum(-1) / 4)


def distribution(rule: Relaxation, p: Tensor, q: Tensor, depth: int) -> Tensor:
    depths = torch.full((1,), depth)
    return rule.relax(p.log()[None], q.log()[None], depths=depths, levels=2).log_r[0].exp()


@pytest.mark.parametrize(("inner", "mode"), PAIRS)
@pytest.mark.parametrize("rule", [Halfway(), BOUNDED, Cool(omega=2.0, nu=0)])
def test_the_first_token_follows_the_relaxed_distribution(rule: Relaxation, inner: Verifier, mode: DraftMode) -> None:
    distributions = toy()
    made = outcome(distributions, RelaxedVerifier(rule, inner), mode, runs=20_000, shape=FLAT).sum(1)
    assert distance(made, distribution(rule, distributions.p, distributions.q, 0)) < TOLERANCE
    assert distance(made, distributions.p) > 2 * TOLERANCE


def test_rows_of_leaves_are_not_relaxed() -> None:
    distributions = toy()
    made = outcome(distributions, RelaxedVerifier(BOUNDED, GumbelVerifier()), "gumbel", runs=20_000, shape=FLAT)
    assert (
        distance(made, distribution(BOUNDED, distributions.p, distributions.q, 0)[:, None] * distributions.p_next)
        < 1.5 * TOLERANCE
    )


def walked(distributions: Toy, rule: Relaxation, inner: Verifier, mode: DraftMode, has_inner: bool = False):  # type: ignore[no-untyped-def]
    noise = spread_noise(2000, 3)
    tree = draw_tree(distributions, mode, noise, 2000)
    tree = replace(tree, inner=TREE.inner()) if has_inner else tree
    log_p = target_distribution(distributions, tree)
    rows = GivenRows(log_p, tree.shape.depths.expand(2000, -1), noise)
    return tree, log_p, RelaxedVerifier(rule, inner).verify(tree, rows, noise)


@pytest.mark.parametrize(("inner", "mode"), PAIRS)
def test_reported_total_variation_is_that_along_the_path(inner: Verifier, mode: DraftMode) -> None:
    distributions = toy()
    tree, log_p, verdict = walked(distributions, BOUNDED, inner, mode)
    cost = verdict.cost
    assert cost is not None and cost.latent_distance is not None
    node = torch.zeros_like(verdict.length)
    for j in range(3):
        is_visited = j <= verdict.length
        for i in is_visited.nonzero()[:300, 0].tolist():
            at, is_leaf = int(node[i]), not bool((tree.shape.parents[1:] == node[i]).any())
            p = log_p[i, at].exp()
            assert tree.log_q is not None
            r = p if is_leaf else distribution(BOUNDED, p, tree.log_q[i, at].exp(), j)
            spent = float((r - p).abs().sum() / 2)
            assert float(cost.total_variation[i, j]) == pytest.approx(spent, abs=1e-6)
            if j < int(verdict.length[i]):
                token = tree.tokens[i, verdict.path[i, j]]
                owed = float((1 - p[token] / r[token]).clamp(min=0))
                assert float(cost.relaxed[i, j]) == pytest.approx(owed, abs=1e-5)
        node = verdict.path[:, j] if j < 2 else node


def test_drafts_without_log_q_raise() -> None:
    tree = DraftTree(torch.zeros(1, 9, dtype=torch.long), TREE.shape(), "point")
    rows = GivenRows(torch.zeros(1, 9, TOKENS), torch.zeros(1, 9, dtype=torch.long), noise := spread_noise(2000, 3))
    with pytest.raises(ValueError, match="use a drafter that records it"):
        RelaxedVerifier(BOUNDED, GumbelVerifier()).verify(tree, rows, noise)


VECTORS = tiny_codebook()


def decode(name: str, sampling: Sampling = SAMPLING, **how: Any) -> Generation:
    condition, keys = tiny_condition((4, 1, 6, 3, 2, 5)), [(seed, 0) for seed in range(6)]
    return tiny_decoder(name, sampling=sampling, engine=BLIND, **how).generate(condition, keys=keys)


@pytest.mark.parametrize("sampling", [Sampling(guidance=3), Sampling(guidance=3, temperature=0)])
@pytest.mark.parametrize("settings", [{"delta": 0.0}, {"k": 0}, {"cap": 1.0}])
def test_zero_budget_equals_plain_decoding(sampling: Sampling, settings: dict[str, Any]) -> None:
    plain = decode("plain", sampling).tokens
    made = decode("bounded", sampling, **settings)
    assert torch.equal(made.tokens, plain)
    assert made.total_variation.sum() == 0 and made.relaxed.sum() == 0


def test_reported_total_variation_is_within_delta() -> None:
    exact = decode("eagle1")
    for delta in (0.1, 0.3):
        made = decode("bounded", k=20, delta=delta)
        assert made.total_variation_max is not None and made.latent_distance is not None
        assert (made.total_variation_max > 0).all() and (made.total_variation_max <= delta).all()
        assert (made.total_variation <= 16 * made.total_variation_max).all()
        nearest, farthest = torch.cdist(VECTORS, VECTORS).fill_diagonal_(99).min(), torch.cdist(VECTORS, VECTORS).max()
        mean = made.latent_distance / made.total_variation
        assert (mean >= nearest).all() and (mean <= farthest).all()
        assert made.steps.sum() < exact.steps.sum()


@pytest.mark.parametrize("name", ["bounded", "lantern", "cool", "tolerance"])
def test_without_a_codebook_no_distance_is_reported(name: str) -> None:
    assert decode(name, has_codebook=False).latent_distance is None
    reported = decode(name).latent_distance
    assert reported is not None and (reported >= 0).all() and reported.sum() > 0
