"""Tolerance: the draws that are never made behave as if they had been."""

import itertools

import pytest
import torch
from torch import Tensor

from lantern.decoding.loop import check_modes
from lantern.eval.price import Case, emitted
from lantern.relaxations.neighbours import proximity_table
from lantern.relaxations.tolerance import Tolerance
from lantern.verifiers.rejection import RejectionVerifier
from tests.verifiers.toys import outcome, toy

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.15, 0.25, 0.5], dtype=torch.float64)
CODEBOOK = torch.arange(4.0)[:, None]
CASE = Case(P, Q, CODEBOOK, proximity_table(CODEBOOK, 3))


def by_drawing(samples: int, drafts: list[int]) -> Tensor:
    """Every way that the target's draws may fall: the first draft among them is taken, else the first draw."""
    law = torch.zeros_like(P)
    for drawn in itertools.product(range(4), repeat=samples):
        taken = next((draft for draft in drafts if draft in drawn), drawn[0])
        law[taken] += P[list(drawn)].prod()
    return law


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("drafts", [[3], [3, 2], [3, 2, 1]])
def test_the_law_is_that_of_making_the_draws(samples: int, drafts: list[int]) -> None:
    assert torch.allclose(emitted(Tolerance(samples), CASE, len(drafts)).law, by_drawing(samples, drafts), atol=1e-12)


def test_one_sample_is_exact_draw_for_draw() -> None:
    exact = outcome(toy(), RejectionVerifier(), "point", runs=20_000)
    assert torch.equal(outcome(toy(), RejectionVerifier(Tolerance(1)), "point", runs=20_000), exact)


def test_the_price_of_one_draft_is_its_total_variation() -> None:
    found = emitted(Tolerance(3), CASE, 1)
    assert found.reported == pytest.approx(float((found.law - P).abs().sum() / 2), abs=1e-12)


def test_drafts_drawn_from_q_are_refused() -> None:
    class Drafter:
        mode = "sampled"

    with pytest.raises(ValueError, match="use one of point"):
        check_modes(Drafter(), RejectionVerifier(Tolerance()))  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [0, 1.5, True])
def test_samples_out_of_range_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples is {samples}"):
        Tolerance(samples)
