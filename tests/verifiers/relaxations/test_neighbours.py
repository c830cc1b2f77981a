"""The proximity table, and mass moved between neighbours."""

import pytest
import torch

from lantern.verifiers.relaxations import neighbours


def test_neighbours_are_nearest_first_without_the_token_itself() -> None:
    codebook = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.5, 0.0]])
    assert neighbours.proximity_table(codebook, 3).tolist() == [[1, 3, 2], [3, 0, 2], [0, 1, 3], [1, 0, 2]]


def test_the_lowest_index_wins_among_equals() -> None:
    codebook = torch.tensor([[0.0], [1.0], [-1.0], [1.0], [1.0]])
    assert neighbours.proximity_table(codebook, 3)[0].tolist() == [1, 2, 3]
    assert neighbours.proximity_table(codebook, 4)[3].tolist() == [1, 4, 0, 2]


@pytest.mark.parametrize(("tokens", "k", "values"), [(300, 7, 1000), (300, 40, 9), (60, 59, 3), (500, 100, 2)])
def test_selection_is_that_of_a_stable_sort(tokens: int, k: int, values: int) -> None:
    """With few values many tokens are as near as the k-th, more than the selection sorts."""
    distances = torch.randint(values, (20, tokens), generator=torch.Generator().manual_seed(0)).double()
    distances[:, 3] = torch.inf
    assert torch.equal(neighbours.nearest(distances, k), distances.sort(dim=1, stable=True).indices[:, :k])


def test_block_size_does_not_change_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    whole = neighbours.proximity_table(codebook, 49)
    monkeypatch.setattr(neighbours, "BLOCK", 7)
    assert torch.equal(neighbours.proximity_table(codebook, 49), whole)
    assert torch.equal(neighbours.proximity_table(codebook, 5), whole[:, :5])
    assert torch.equal(
        whole.sort(1).values, torch.stack([torch.tensor([j for j in range(50) if j != i]) for i in range(50)]).int()
    )


def test_distances_match_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    table = neighbours.proximity_table(codebook, 20)
    distances = neighbours.proximity_distances(codebook, table)
    assert torch.allclose(distances, torch.cdist(codebook, codebook).gather(1, table.long()), atol=1e-5)
    assert (distances.diff(dim=1) >= 0).all()
    monkeypatch.setattr(neighbours, "BLOCK", 7)
    assert torch.equal(neighbours.proximity_distances(codebook, table), distances)
    with pytest.raises(ValueError, match="the codebook has 49 tokens, the proximity table 50"):
        neighbours.proximity_distances(codebook[:49], table)


@pytest.mark.parametrize("k", [0, 4, 2000])
def test_invalid_k_raises(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}, wanted from 1 to 3"):
        neighbours.proximity_table(torch.randn(4, 2), k)


def test_prefix_stops_at_the_first_token_over_the_budget() -> None:
    masses = torch.tensor([[0.1, 0.2, 0.0, 0.5, 0.01]])
    taken, mass = neighbours.longest_prefix(masses, torch.tensor([0.35]))
    assert taken.tolist() == [[True, True, True, False, False]]  # 0.01 would fit, but lies behind 0.5
    assert mass.item() == pytest.approx(0.3)
    taken, mass = neighbours.longest_prefix(masses, torch.tensor([0.05]))
    assert not taken.any() and mass.item() == 0
