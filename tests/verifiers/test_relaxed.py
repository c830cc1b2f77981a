"""Exact verification of a relaxed distribution: tokens follow r, and the cost is TV(r, p)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Generation, Verifier
from lantern.drafters.trees import StaticTree
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.distributions import Bounded, Cool, Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed
from lantern.verifiers.relaxed import RelaxedRows, RelaxedVerifier
from tests.proof.draws import Progress, bulk_noise, drafted, draw
from tests.proof.enumeration import node_strings
from tests.proof.worlds import GivenRows, world
from tests.refusals import refused
from tests.tiny import tiny_condition
from tests.tiny_decoder import BLIND, SAMPLING, tiny_decoder

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)))
CODEBOOK = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
LINE = proximity_table(CODEBOOK, 4)
BOUNDED = Bounded(LINE, k=3, delta=0.3, distances=proximity_distances(CODEBOOK, LINE))
PAIRS: list[tuple[Verifier, DraftMode]] = [
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


def relaxed(rule: Relaxation, log_p: Tensor, log_q: Tensor, depth: int) -> Tensor:
    depths = torch.full((1,), depth)
    return rule.relax(log_p[None], log_q[None], depths=depths, levels=2).log_r[0].exp()


@pytest.mark.parametrize(("inner", "mode"), PAIRS)
@pytest.mark.parametrize("rule", [Halfway(), BOUNDED, Cool(omega=2.0, nu=0), Mixture(delta=0.3)])
def test_tokens_follow_the_relaxed_distribution(rule: Relaxation, inner: Verifier, mode: DraftMode) -> None:
    """Of images of one token; p and q are a world's at its only place."""
    toy = world("generic", 3, tokens=5, count=1)
    made = draw(toy, RelaxedVerifier(rule, inner), mode, StaticTree(((0,), (1,))))
    assert made.p_value(relaxed(rule, toy.logs.p[0], toy.logs.q[0], 0)) > 1e-4
    assert made.p_value(toy.p[0]) < 1e-9


def walk(inner: Verifier, mode: DraftMode) -> tuple[DraftTree, GivenRows, Any]:
    toy, noise = world("generic", 3, tokens=5, count=3), bulk_noise(100, 3, 5, 0)
    progress = Progress(toy, 100)
    tree = drafted(toy, mode, TREE, noise, progress, noise.generator(50), is_fresh=False)
    strings = node_strings(toy, tree.tokens, tree.shape)
    tree = replace(tree, log_q=toy.single.log_q(strings))  # also of leaves
    rows = GivenRows(toy.single.log_p(strings), tree.shape.depths.expand(100, -1), noise)
    return tree, rows, RelaxedVerifier(BOUNDED, inner).verify(tree, rows, noise)


@pytest.mark.parametrize(("inner", "mode"), PAIRS)
def test_reported_total_variation_is_that_along_the_path(inner: Verifier, mode: DraftMode) -> None:
    tree, rows, verdict = walk(inner, mode)
    cost, visited = verdict.cost, torch.nn.functional.pad(verdict.path, (1, 0))
    for i in range(100):
        for j in range(int(verdict.length[i]) + 1):
            node = int(visited[i, j])
            log_p, is_leaf = rows.every[i, node], not bool((tree.shape.parents[1:] == node).any())
            p = log_p.exp()
            r = p if is_leaf else relaxed(BOUNDED, log_p, tree.log_q[i, node], j)
            assert float(cost.total_variation[i, j]) == pytest.approx(float((r - p).abs().sum() / 2), abs=1e-6)
            if j < int(verdict.length[i]):
                token = tree.tokens[i, verdict.path[i, j]]
                assert float(cost.relaxed[i, j]) == pytest.approx(
                    float((1 - p[token] / r[token]).clamp(min=0)), abs=1e-5
                )


def test_rows_of_leaves_are_not_relaxed() -> None:
    tree, rows, _ = walk(GumbelVerifier(), "gumbel")
    found, inner = RelaxedRows(BOUNDED, tree, rows, rows.noise).log_p(), TREE.inner()
    is_leaf = ~torch.zeros(9, dtype=torch.bool).scatter(0, inner, True)
    assert torch.equal(found[:, is_leaf], rows.every[:, is_leaf])
    assert ((found - rows.every)[:, inner].abs().amax((0, 2)) > 0.01).all()


def test_what_cannot_be_relaxed_is_refused() -> None:
    with pytest.raises(Exception, match="use RejectionVerifier|Expected type"):
        RelaxedVerifier(Lantern(LINE, k=2), GumbelVerifier())  # type: ignore[arg-type]
    refused(RejectionVerifier, Cool(), error=Exception, match="use RelaxedVerifier|Expected type")
    refused(RelaxedVerifier, BOUNDED, RejectionVerifier(Lantern(LINE, k=2)), match="wanted GumbelVerifier")
    tree, rows, _ = walk(GumbelVerifier(), "point")
    with pytest.raises(ValueError, match="use a drafter that records it"):
        RelaxedRows(BOUNDED, DraftTree(tree.tokens, tree.shape, "point"), rows, rows.noise)


def decode(name: str, sampling: Sampling = SAMPLING, **how: Any) -> Generation:
    condition, keys = tiny_condition((4, 1, 6, 3, 2, 5)), [(seed, 0) for seed in range(6)]
    return tiny_decoder(name, sampling=sampling, engine=BLIND, **how).generate(condition, keys=keys)


@pytest.mark.parametrize(("temperature", "settings"), [(1, {"delta": 0.0}), (1, {"k": 0}), (0, {"cap": 1.0})])
def test_zero_budget_equals_plain_decoding(temperature: float, settings: dict[str, Any]) -> None:
    sampling = Sampling(guidance=3, temperature=temperature)
    made = decode("bounded", sampling, **settings)
    assert torch.equal(made.tokens, decode("plain", sampling).tokens)
    assert made.total_variation.sum() == 0 and made.relaxed.sum() == 0


@pytest.mark.parametrize("name", ["bounded", "lantern", "cool", "tolerance"])
def test_without_a_codebook_no_distance_is_reported(name: str) -> None:
    assert decode(name, has_codebook=False).latent_distance is None
    reported = decode(name).latent_distance
    assert reported is not None and (reported >= 0).all() and reported.sum() > 0
