"""Tolerance matches explicit sampling."""

import itertools

import pytest
import torch
from torch import Tensor

from lantern.decoding.loop import check_modes
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.tolerance import Tolerance
from tests.verifiers.relaxations.enumeration import Case, emitted

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.15, 0.25, 0.5], dtype=torch.float64)
CODEBOOK = torch.arange(4.0)[:, None]
CASE = Case(P, Q, CODEBOOK, proximity_table(CODEBOOK, 3))


def by_drawing(samples: int, drafts: list[int]) -> Tensor:
    """Enumerate the target's samples: the first draft among them is taken, else the first sample."""
    distribution = torch.zeros_like(P)
    for sampled in itertools.product(range(4), repeat=samples):
        taken = next((draft for draft in drafts if draft in sampled), sampled[0])
        distribution[taken] += P[list(sampled)].prod()
    return distribution


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("drafts", [[3], [3, 2], [3, 2, 1]])
def test_distribution_matches_explicit_samples(samples: int, drafts: list[int]) -> None:
    assert torch.allclose(
        emitted(Tolerance(samples), CASE, len(drafts)).distribution, by_drawing(samples, drafts), atol=1e-12
    )


def test_reported_cost_of_one_draft_is_its_total_variation() -> None:
    found = emitted(Tolerance(3), CASE, 1)
    assert found.reported == pytest.approx(float((found.distribution - P).abs().sum() / 2), abs=1e-12)


def test_sampled_drafts_raise() -> None:
    class Drafter:
        mode = "sampled"

    with pytest.raises(ValueError, match="use one of point"):
        check_modes(Drafter(), RejectionVerifier(Tolerance()))  # type: ignore[arg-type]
