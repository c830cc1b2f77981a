"""The price of relaxed rules, enumerated: what is reported is never below what is realised."""

import json
from pathlib import Path

import pytest
import torch

from lantern.eval.max_flow import max_flow
from lantern.eval.price import RESULTS, Case, emitted, lines, main, random_case, relaxed, rules, table
from lantern.relaxations.grouped import Grouped
from lantern.relaxations.lantern import Lantern
from lantern.relaxations.lantern_pp import LanternPP
from lantern.relaxations.neighbours import proximity_table
from lantern.relaxations.tolerance import Tolerance
from lantern.trees.static import StaticTree
from lantern.types import Acceptance, DraftMode
from lantern.verifiers.rejection import RejectionVerifier
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
def test_enumeration_is_what_the_verifier_draws(rule: Acceptance, drafts: int) -> None:
    laws = toy()
    mode: DraftMode = "point" if isinstance(rule, Tolerance) else "sampled"
    flat = StaticTree(tuple((rank,) for rank in range(drafts)))
    made = outcome(laws, RejectionVerifier(rule), mode, runs=20_000, shape=flat).sum(1)
    found = emitted(rule, Case(laws.p.double(), laws.q.double(), CODEBOOK, TABLE), drafts)
    assert distance(made, found.law) < 0.015
    assert float(found.law.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_reported_price_is_at_least_the_realised_one(drafts: int) -> None:
    for seed in range(30):
        drawn = case(seed)
        for rule in rules():
            one = rule.make(drawn)
            found = relaxed(one, drawn) if hasattr(one, "relax") else emitted(one, drawn, drafts)
            realised = float((found.law - drawn.p).abs().sum() / 2)
            assert found.reported >= realised - 1e-9, rule.name
            if hasattr(one, "relax"):
                assert found.reported == pytest.approx(realised, abs=1e-9)


def test_released_residuals_are_bounded_too() -> None:
    for seed in range(40):
        drawn = case(seed)
        found = emitted(Lantern(drawn.table, k=3, delta=0.2, residual="released"), drawn, 2)
        assert found.reported >= float((found.law - drawn.p).abs().sum() / 2) - 1e-9


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_rules_without_a_budget_emit_p(drafts: int) -> None:
    for seed in range(20):
        drawn = case(seed)
        for rule in (
            Lantern(drawn.table, k=3, delta=0),
            LanternPP(drawn.table, k=3, lambda_=1),
            Grouped(drawn.codebook, group=0),
            Tolerance(1),
        ):
            found = emitted(rule, drawn, drafts)
            assert (found.law - drawn.p).abs().max() < 1e-12 and abs(found.reported) < 1e-12


def test_a_delta_of_lantern_is_not_what_it_realises() -> None:
    """The finding that the table is for: one test moves at most delta, the law moves by more."""
    drawn = [random_case(3.8, 64, torch.Generator().manual_seed(seed)) for seed in range(2)]
    for one in drawn:
        law = emitted(Lantern(one.table, k=8, delta=0.05), one, 1).law
        assert float((law - one.p).abs().sum() / 2) > 2 * 0.05


def test_a_largest_flow_by_hand() -> None:
    # y0 may feed both x, y1 only x0: the best plan sends y0 to x1.
    assert max_flow([0.3, 0.3], [0.3, 0.3], [(0, 0), (0, 1), (1, 0)]) == pytest.approx(0.6)
    assert max_flow([0.3, 0.3], [0.3, 0.3], [(0, 0), (1, 0)]) == pytest.approx(0.3)
    assert max_flow([0.3], [0.5], []) == 0


def test_small_tables_are_the_same_again_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--codes", "12", "--cases", "2", "--out", str(tmp_path / "price.json")])
    written = json.loads((tmp_path / "price.json").read_text())
    again = table(12, 2)
    assert written == json.loads(json.dumps(again))
    assert capsys.readouterr().out.splitlines() == lines(again)


def test_committed_figures_are_these_rules_and_keep_what_they_promise() -> None:
    kept = json.loads(RESULTS.read_text())
    assert [(one["name"], one["settings"]) for one in kept["rules"]] == [
        (rule.name, dict(rule.settings)) for rule in rules()
    ]
    for one in kept["rules"]:
        for row in one["rows"]:
            for name in ("one_draft", "two_drafts"):
                assert row[name]["reported_mean"] >= row[name]["realised_mean"] - 1e-5
                assert one["name"] != "bounded" or row[name]["realised_max"] <= one["settings"]["delta"] + 1e-5
