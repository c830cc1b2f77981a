"""Edge cases of multi-round rejection; tests/proof compares its distribution with the target's."""

from dataclasses import replace

import pytest
import torch

from lantern.core.types import DraftMode
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.cool import Cool
from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.rule import Acceptance
from lantern.verifiers.relaxations.tolerance import Tolerance
from tests.verifiers.toys import expected, outcome, toy


def test_tokens_of_zero_probability_are_never_accepted() -> None:
    distributions = toy()
    distributions = replace(distributions, q_next=torch.eye(5)[[1, 0, 0, 0, 0]] * 0.9 + 0.02)
    assert distributions.p_next[0, 1] == 0
    assert outcome(distributions, RejectionVerifier(), "sampled")[0, 1] == 0


def test_rejection_at_temperature_zero_gives_the_argmax() -> None:
    distributions = toy()
    hot = torch.nn.functional.one_hot
    greedy = replace(
        distributions,
        p=hot(distributions.p.argmax(), 5).float(),
        p_next=hot(distributions.p_next.argmax(-1), 5).float(),
    )
    for mode in ("point", "sampled"):
        assert torch.equal(outcome(greedy, RejectionVerifier(), mode, runs=2000), expected(greedy))


LINE = torch.arange(5.0)[:, None]
TABLE = proximity_table(LINE, 4)
WITHOUT_BUDGET = [
    Lantern(TABLE, k=3, delta=0),
    Lantern(TABLE, k=0),
    LanternPP(TABLE, k=3, lambda_=1),
    Grouped(LINE, group=0),
    Grouped(LINE, p_radius=0.0),
    Grouped(LINE, d_radius=0.0),
    Tolerance(1),
]


@pytest.mark.parametrize(
    ("rule", "mode"),
    [(rule, mode) for rule in WITHOUT_BUDGET for mode in ("sampled", "point") if mode in RejectionVerifier(rule).modes],
)
def test_rules_without_a_budget_are_exact_rejection(rule: Acceptance, mode: DraftMode) -> None:
    exact = outcome(toy(), RejectionVerifier(), mode, runs=20_000)
    assert torch.equal(outcome(toy(), RejectionVerifier(rule), mode, runs=20_000), exact)


def test_distribution_relaxations_raise() -> None:
    with pytest.raises(Exception, match="use RelaxedVerifier|Expected type"):
        RejectionVerifier(Cool())  # type: ignore[arg-type]
