"""Relaxed acceptance rules by enumeration: what they emit, and that they report at least what they move."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from lantern.core.types import DraftMode
from lantern.drafters.trees import StaticTree
from lantern.verifiers.rejection import RejectionVerifier, cost_of, normalised
from lantern.verifiers.relaxations.acceptance import Grouped, Tolerance
from lantern.verifiers.relaxations.distributions import Bounded, Cool, Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP, proximity_table
from lantern.verifiers.relaxations.rule import Acceptance, Relaxation, UnderTest
from tests.proof.draws import draw
from tests.proof.worlds import world

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


def emitted(rule: Acceptance | Relaxation, case: Case, drafts: int) -> Emitted:
    """Enumerate the rejection verifier at one node with `drafts` siblings, sampled without replacement from q.

    Rules for point drafts get the most probable tokens of q instead.
    """
    if isinstance(rule, Relaxation):
        depths = torch.zeros(1, dtype=torch.long)
        found = rule.relax(case.p.log()[None], case.q.log()[None], depths=depths, levels=1)
        return Emitted(found.log_r[0].exp(), float(found.total_variation))
    p, q, weight = case.p[None], case.q[None], torch.ones_like(case.p[:1])
    distribution, reported = torch.zeros_like(case.p), 0.0
    is_point = rule.modes == frozenset({"point"})
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
