"""Relaxed acceptance by enumeration, and exact verification of a relaxed distribution r.

Rules report at least what they move; tokens of a relaxation follow r, and the cost is TV(r, p).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftMode, DraftTree, Generation, Verifier
from lantern.drafters.trees import StaticTree
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier, cost_of, normalised
from lantern.verifiers.relaxations.acceptance import Grouped, Tolerance
from lantern.verifiers.relaxations.distributions import Bounded, Cool, Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP, proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Acceptance, Relaxation, Relaxed, UnderTest
from lantern.verifiers.relaxed import RelaxedRows, RelaxedVerifier
from tests.proof.draws import Progress, bulk_noise, drafted, draw
from tests.proof.enumeration import node_strings
from tests.proof.worlds import GivenRows, world
from tests.refusals import refused
from tests.tiny import tiny_condition
from tests.tiny_decoder import BLIND, SAMPLING, tiny_decoder

CODEBOOK = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TABLE = proximity_table(CODEBOOK, 4)


@dataclass(frozen=True)
class Case:
    """Distributions p of a target and q of a drafter, and a codebook with its proximity table."""

    p: Float[Tensor, " v"]
    q: Float[Tensor, " v"]
    codebook: Float[Tensor, "v d"]
    table: Int32[Tensor, "v k"]


@dataclass(frozen=True)
class Emitted:
    """The distribution emitted at a node, and the mean reported total variation."""

    distribution: Float[Tensor, " v"]
    reported: float

    def moved(self, case: Case) -> float:
        return float((self.distribution - case.p).abs().sum() / 2)


def random_case(seed: int, tokens: int = 10, sharpness: float = 2.0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(tokens, generator=generator, dtype=torch.float64)
    drafted = logits + torch.randn(tokens, generator=generator, dtype=torch.float64)
    codebook = torch.nn.functional.normalize(torch.randn(tokens, 8, generator=generator, dtype=torch.float64), dim=1)
    return Case(logits.softmax(0), drafted.softmax(0), codebook, proximity_table(codebook, tokens - 1))


def emitted(rule: Acceptance | Relaxation, case: Case, drafts: int, is_point: bool = False) -> Emitted:
    """Enumerate the rejection verifier at one node with `drafts` siblings, sampled without replacement from q.

    With `is_point`, and for rules for point drafts, they are the most probable tokens of q.
    """
    if isinstance(rule, Relaxation):
        depths = torch.zeros(1, dtype=torch.long)
        found = rule.relax(case.p.log()[None], case.q.log()[None], depths=depths, levels=1)
        return Emitted(found.log_r[0].exp(), float(found.total_variation))
    p, q, weight = case.p[None], case.q[None], torch.ones_like(case.p[:1])
    distribution, reported = torch.zeros_like(case.p), 0.0
    is_point = is_point or rule.modes == frozenset({"point"})
    best = case.q.argsort(descending=True)
    for rank in range(drafts):
        tokens = best[rank : rank + 1] if is_point else torch.arange(len(case.p))
        token, each = tokens.repeat(len(p)), len(tokens)
        p, q, weight = (rows.repeat_interleave(each, 0) for rows in (p, q, weight))
        seen = torch.nn.functional.one_hot(token, len(case.p)).to(q) if is_point else q
        trial = UnderTest(p, seen, token, is_point)
        weight = weight * trial.own_q
        ruling = rule.judge(trial)
        chance = (ruling.mass / trial.own_q.clamp(min=1e-300)).clamp(max=1.0)
        distribution.scatter_add_(0, token, weight * chance)
        left = normalised(ruling.left, p)
        reported += float((weight * cost_of(trial, ruling, left)[0]).sum())
        weight = weight * (1.0 - chance)
        p, q = left, normalised(q.scatter(1, token[:, None], 0.0), q)
    return Emitted(distribution + weight @ p, reported)


@pytest.mark.parametrize(
    "rule",
    [
        Lantern(TABLE, k=3, delta=0.2),
        Lantern(TABLE, k=3, delta=0.2, residual="released"),
        LanternPP(TABLE, k=3, lambda_=3),
        Grouped(CODEBOOK, group=2, p_radius=1.0, d_radius=9.0),
        Tolerance(3),
    ],
)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_enumeration_matches_the_verifier(rule: Acceptance, drafts: int) -> None:
    """Images of one token. The third of three point drafts repeats the first, which changes nothing."""
    toy = world("generic", 3, tokens=5, count=1)
    is_point = isinstance(rule, Tolerance)
    mode: DraftMode = "point" if is_point else "sampled"
    flat = StaticTree(tuple((rank,) for rank in range(drafts)))
    found = emitted(rule, Case(toy.p[0], toy.q[0], CODEBOOK, TABLE), min(drafts, 2) if is_point else drafts)
    assert draw(toy, RejectionVerifier(rule), mode, flat).p_value(found.distribution) > 1e-4
    assert float(found.distribution.sum()) == pytest.approx(1, abs=1e-6)


RULES: dict[str, Callable[[Case], Acceptance | Relaxation]] = {
    "bounded": lambda case: Bounded(case.table, k=8, delta=0.2),
    "mixture": lambda case: Mixture(delta=0.2),
    "lantern": lambda case: Lantern(case.table, k=8, delta=0.1),
    "released": lambda case: Lantern(case.table, k=3, delta=0.2, residual="released"),
    "lantern++": lambda case: LanternPP(case.table, k=8, lambda_=5.0),
    "cool": lambda case: Cool(omega=2.0),
    "grouped": lambda case: Grouped(case.codebook, d_radius=1.0),
    "tolerance": lambda case: Tolerance(4),
}


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_reported_variation_is_at_least_the_realised_one(name: str, drafts: int) -> None:
    for seed in range(30):
        case = random_case(seed, sharpness=0.3 + seed / 10)
        rule = RULES[name](case)
        found = emitted(rule, case, drafts)
        assert found.reported >= found.moved(case) - 1e-9
        if isinstance(rule, Relaxation):
            assert found.reported == pytest.approx(found.moved(case), abs=1e-9)
            continue
        found = emitted(rule, case, drafts, is_point=True)
        assert found.reported >= found.moved(case) - 1e-9
        if drafts == 1:
            assert found.reported == pytest.approx(found.moved(case), abs=1e-9)


def test_sums_above_one_are_reported_as_they_are() -> None:
    """Capped at 1, their mean would be no bound."""
    case, images, drafts = random_case(26, tokens=40, sharpness=0.3), 10_000, 12
    rule = Lantern(case.table, k=8, delta=0.4, residual="cool")
    best = case.q.argsort(descending=True)[:drafts]
    shape = StaticTree(tuple((rank,) for rank in range(drafts))).shape()
    noise = Noise([(0, image) for image in range(images)], positions=2, vocab_size=len(case.p))
    tree = DraftTree(torch.cat([best[:1], best]).expand(images, -1), shape, "point")
    rows = GivenRows(case.p.log().expand(images, drafts + 1, -1), shape.depths.expand(images, -1), noise)
    verdict = RejectionVerifier(rule).verify(tree, rows, noise)
    assert verdict.cost is not None
    spent = verdict.cost.total_variation.sum(1).double()
    found, error = emitted(rule, case, drafts, is_point=True), float(spent.std()) / images**0.5
    assert float(spent.mean()) == pytest.approx(found.reported, abs=5 * error)
    assert float(spent.clamp(max=1).mean()) < found.moved(case) < found.reported


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_rules_without_a_budget_emit_p(drafts: int) -> None:
    for seed in range(20):
        case = random_case(seed)
        for rule in (
            Lantern(case.table, k=3, delta=0),
            LanternPP(case.table, k=3, lambda_=1),
            Grouped(case.codebook, group=0),
            Tolerance(1),
        ):
            found = emitted(rule, case, drafts)
            assert (found.distribution - case.p).abs().max() < 1e-12 and abs(found.reported) < 1e-12


P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.15, 0.25, 0.5], dtype=torch.float64)
FOUR = Case(P, Q, torch.arange(4.0)[:, None], proximity_table(torch.arange(4.0)[:, None], 3))


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("drafts", [[3], [3, 2], [3, 2, 1]])
def test_tolerance_matches_explicit_samples(samples: int, drafts: list[int]) -> None:
    """The first draft among the target's samples is taken, else the first sample."""
    expected = torch.zeros_like(P)
    for sampled in itertools.product(range(4), repeat=samples):
        taken = next((draft for draft in drafts if draft in sampled), sampled[0])
        expected[taken] += P[list(sampled)].prod()
    assert torch.allclose(emitted(Tolerance(samples), FOUR, len(drafts)).distribution, expected, atol=1e-12)


TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)))
BOUNDED = Bounded(TABLE, k=3, delta=0.3, distances=proximity_distances(CODEBOOK, TABLE))
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
    found, inner = RelaxedRows(BOUNDED, tree, rows, rows.noise).log_p(), TREE.inner_nodes()
    is_leaf = ~torch.zeros(9, dtype=torch.bool).scatter(0, inner, True)
    assert torch.equal(found[:, is_leaf], rows.every[:, is_leaf])
    assert ((found - rows.every)[:, inner].abs().amax((0, 2)) > 0.01).all()


def test_what_cannot_be_relaxed_is_refused() -> None:
    with pytest.raises(Exception, match="use RejectionVerifier|Expected type"):
        RelaxedVerifier(Lantern(TABLE, k=2), GumbelVerifier())  # type: ignore[arg-type]
    refused(RejectionVerifier, Cool(), error=Exception, match="use RelaxedVerifier|Expected type")
    refused(RelaxedVerifier, BOUNDED, RejectionVerifier(Lantern(TABLE, k=2)), match="wanted GumbelVerifier")
    tree, rows, _ = walk(GumbelVerifier(), "point")
    bare = replace(tree, log_q=None)
    refused(RelaxedRows, BOUNDED, bare, rows, rows.noise, match="use a drafter that records it")


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
