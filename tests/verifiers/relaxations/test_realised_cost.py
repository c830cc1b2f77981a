"""Total variation of relaxed rules, enumerated: the reported value is never below the realised one."""

import pytest
import torch

from lantern.core.types import Acceptance, DraftMode
from lantern.drafters.trees.static import StaticTree
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.tolerance import Tolerance
from tests.verifiers.relaxations.enumeration import RULES as ALL
from tests.verifiers.relaxations.enumeration import Case, emitted, max_flow, random_case, relaxed
from tests.verifiers.toys import CODES, distance, outcome, toy

CODEBOOK = torch.randn(CODES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TABLE = proximity_table(CODEBOOK, CODES - 1)
RULES = [
    Lantern(TABLE, k=3, delta=0.2),
    Lantern(TABLE, k=3, delta=0.2, residual="released"),
    LanternPP(TABLE, k=3, lambda_=3),
    Grouped(CODEBOOK, group=2, p_radius=1.0, d_radius=9.0),
    Tolerance(3),
]


def case(seed: int, codes: int = 10) -> Case:
    generator = torch.Generator().manual_seed(seed)
    return random_case(float(torch.rand(1, generator=generator)) * 1.7 + 0.1, codes, generator)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_enumeration_matches_the_verifier(rule: Acceptance, drafts: int) -> None:
    distributions = toy()
    mode: DraftMode = "point" if isinstance(rule, Tolerance) else "sampled"
    flat = StaticTree(tuple((rank,) for rank in range(drafts)))
    made = outcome(distributions, RejectionVerifier(rule), mode, runs=20_000, shape=flat).sum(1)
    found = emitted(rule, Case(distributions.p.double(), distributions.q.double(), CODEBOOK, TABLE), drafts)
    assert distance(made, found.distribution) < 0.015
    assert float(found.distribution.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_reported_tv_is_at_least_the_realised_one(drafts: int) -> None:
    for seed in range(30):
        sampled = case(seed)
        for name, make in ALL.items():
            one = make(sampled)
            found = relaxed(one, sampled) if hasattr(one, "relax") else emitted(one, sampled, drafts)
            realised = float((found.distribution - sampled.p).abs().sum() / 2)
            assert found.reported >= realised - 1e-9, name
            if hasattr(one, "relax"):
                assert found.reported == pytest.approx(realised, abs=1e-9)


def test_released_residuals_are_bounded_too() -> None:
    for seed in range(40):
        sampled = case(seed)
        found = emitted(Lantern(sampled.table, k=3, delta=0.2, residual="released"), sampled, 2)
        assert found.reported >= float((found.distribution - sampled.p).abs().sum() / 2) - 1e-9


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_rules_without_a_budget_emit_p(drafts: int) -> None:
    for seed in range(20):
        sampled = case(seed)
        for rule in (
            Lantern(sampled.table, k=3, delta=0),
            LanternPP(sampled.table, k=3, lambda_=1),
            Grouped(sampled.codebook, group=0),
            Tolerance(1),
        ):
            found = emitted(rule, sampled, drafts)
            assert (found.distribution - sampled.p).abs().max() < 1e-12 and abs(found.reported) < 1e-12


def test_lantern_realises_more_than_delta() -> None:
    """One test moves at most delta, the distribution moves by more."""
    sampled = [random_case(3.8, 64, torch.Generator().manual_seed(seed)) for seed in range(2)]
    for one in sampled:
        distribution = emitted(Lantern(one.table, k=8, delta=0.05), one, 1).distribution
        assert float((distribution - one.p).abs().sum() / 2) > 2 * 0.05


def test_max_flow_on_small_graphs() -> None:
    # y0 reaches both x, y1 only x0: the largest flow sends y0 to x1
    assert max_flow([0.3, 0.3], [0.3, 0.3], [(0, 0), (0, 1), (1, 0)]) == pytest.approx(0.6)
    assert max_flow([0.3, 0.3], [0.3, 0.3], [(0, 0), (1, 0)]) == pytest.approx(0.3)
    assert max_flow([0.3], [0.5], []) == 0
