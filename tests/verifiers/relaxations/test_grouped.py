"""GSD by hand: groups, their tests, and exact settings."""

import pytest
import torch

from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.rule import Trial

P = torch.tensor([[0.05, 0.3, 0.1, 0.35, 0.2]])  # in order: 3 1 4 2 0
Q = torch.tensor([[0.1, 0.1, 0.2, 0.2, 0.4]])
LINE = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])


def mass(token: int, **settings: float) -> float:
    rule = Grouped(LINE, **({"group": 2, "p_radius": 1.0, "d_radius": 9.0} | settings))  # type: ignore[arg-type]
    return rule.judge(Trial(P, Q, torch.tensor([token]), False)).mass.item()


def test_a_group_is_its_neighbours_in_the_order_of_p() -> None:
    assert mass(4) == pytest.approx(0.4 * (0.3 + 0.2 + 0.1) / (0.1 + 0.4 + 0.2))
    assert mass(3) == pytest.approx(0.2 * (0.35 + 0.3) / (0.2 + 0.1))  # at the end of the order it has one side
    assert mass(4, group=4) == pytest.approx(0.4)  # all tokens


def test_tokens_of_other_probability_are_dropped() -> None:
    assert mass(4, p_radius=0.1) == pytest.approx(0.2)
    assert mass(4, p_radius=0.11) == pytest.approx(0.4 * (0.3 + 0.2 + 0.1) / 0.7)


def test_distant_tokens_are_dropped() -> None:
    assert mass(4, d_radius=2.5) == pytest.approx(0.4 * (0.2 + 0.1) / 0.6)  # 2 is near 4, 1 is not


def test_rejection_leaves_the_exact_residual() -> None:
    ruling = Grouped(LINE).judge(Trial(P, Q, torch.tensor([0]), False))
    assert ruling.left[0].tolist() == pytest.approx([0, 0.2, 0, 0.15, 0])
    assert ruling.reach is not None and ruling.reach.item() == pytest.approx((0.2 * 1 + 0.15 * 3) / 0.35)
