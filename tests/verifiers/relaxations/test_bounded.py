"""The bounded relaxation satisfies its bounds on random distributions, and is near the largest possible flow."""

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from lantern.verifiers.relaxations import neighbours
from lantern.verifiers.relaxations.distributions import Bounded
from lantern.verifiers.relaxations.neighbours import proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Relaxation, Relaxed
from tests.refusals import refused

DEPTHS = torch.zeros(1, dtype=torch.long)
TOLERANCE = 1e-12
CASES = 500


def relax(rule: Relaxation, p: Tensor, q: Tensor) -> Relaxed:
    return rule.relax(p.log()[None], q.log()[None], depths=DEPTHS, levels=1)


def random_distribution(tokens: int, generator: torch.Generator) -> Tensor:
    """Return flat or peaked distributions, some with zeros, some with a single token."""
    logits = torch.randn(tokens, generator=generator, dtype=torch.float64) * torch.rand(1, generator=generator) * 6
    kind = int(torch.randint(4, (1,), generator=generator))
    if kind == 1:
        logits[torch.rand(tokens, generator=generator) < 0.4] = -torch.inf
        logits[0] = 0.0
    if kind == 2 and torch.rand(1, generator=generator) < 0.5:
        return torch.nn.functional.one_hot(logits.argmax(), tokens).double()
    return logits.softmax(0)


def random_case(seed: int) -> tuple[Bounded, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = int(torch.randint(3, 13, (1,), generator=generator))
    codebook = torch.randn(tokens, 2, generator=generator, dtype=torch.float64)
    table = proximity_table(codebook, tokens - 1)
    pick = torch.rand(3, generator=generator)
    rule = Bounded(
        table,
        k=int(pick[0] * tokens),
        delta=round(float(pick[1]) * 0.6, 3),
        cap=1 + round(float(pick[2]) * 5, 2),
        rounds=1 + seed % 3,
        width=tokens if seed % 2 else 3,
        distances=proximity_distances(codebook, table),
    )
    return rule, random_distribution(tokens, generator), random_distribution(tokens, generator)


def largest_flow(rule: Bounded, supply: Tensor, demand: Tensor) -> float:
    """Return the largest flow from tokens with a surplus to tokens with a deficit that have them as neighbours."""
    pairs = [(y, x) for x, near in enumerate(rule.table[:, : rule.k].tolist()) for y in near]
    if not pairs:
        return 0.0
    limits = torch.zeros(2 * len(supply), len(pairs))
    for edge, (y, x) in enumerate(pairs):
        limits[y, edge] = limits[len(supply) + x, edge] = 1.0
    found = linprog(-torch.ones(len(pairs)).numpy(), limits.numpy(), torch.cat([supply, demand]).numpy())
    return -float(found.fun)


def test_random_distributions_satisfy_all_bounds_and_mass_moves_between_neighbours_only() -> None:
    moved = 0
    for seed in range(CASES):
        rule, p, q = random_case(seed)
        found = relax(rule, p, q)
        r, spent = found.log_r[0].exp(), float(found.total_variation)
        assert (r >= 0).all() and abs(float(r.sum()) - 1) < TOLERANCE
        assert (r >= torch.minimum(p, q) - TOLERANCE).all() and (r <= torch.maximum(p, q) + TOLERANCE).all()
        assert spent <= rule.delta
        assert abs(float((r - p).abs().sum() / 2) - spent) < TOLERANCE
        gained = float(torch.minimum(r, q).sum() - torch.minimum(p, q).sum())
        assert abs(gained - spent) < TOLERANCE
        assert (r <= rule.cap * p + TOLERANCE).all()
        assert (r[p == 0] == 0).all()
        moved += spent > 0.01
        if seed % 5 == 0:  # the difference of r and p is a flow over pairs of the table
            reached = largest_flow(rule, (p - r).clamp(min=0), (r - p).clamp(min=0))
            assert reached == pytest.approx(float((r - p).clamp(min=0).sum()), abs=1e-9)
    assert moved > CASES / 4  # the cases are not trivial


def test_the_latent_distance_of_one_pair_is_mass_times_distance() -> None:
    codebook = torch.tensor([[0.0], [3.0], [100.0]])
    table = proximity_table(codebook, 1)
    rule = Bounded(table, k=1, delta=0.1, cap=9, distances=proximity_distances(codebook, table))
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    found = relax(rule, p, q)
    assert found.log_r[0].exp().tolist() == pytest.approx([0.4, 0.4, 0.2], abs=1e-6)
    assert found.latent_distance is not None and found.latent_distance.item() == pytest.approx(0.1 * 3)
    assert relax(Bounded(table, k=1, delta=0.1), p, q).latent_distance is None


def test_proportional_filling_reaches_nine_tenths_of_the_largest_flow() -> None:
    """On 100 cases without the limit delta."""
    reached, largest = 0.0, 0.0
    for seed in range(100):
        sampled, p, q = random_case(seed)
        rule = Bounded(sampled.table, k=max(sampled.k, 1), delta=1.0, cap=4.0, rounds=2, width=len(p))
        surplus = (p - q).clamp(min=0)
        expected = torch.minimum(q - p, 3 * p).clamp(min=0)
        most, found = largest_flow(rule, surplus, expected), float(relax(rule, p, q).total_variation)
        assert found <= most + 1e-9
        reached, largest = reached + found, largest + most
    assert reached / largest > 0.9


def test_narrow_flow_equals_the_dense_one_with_few_deficits() -> None:
    generator = torch.Generator().manual_seed(3)
    codebook = torch.randn(200, 4, generator=generator)
    table = proximity_table(codebook, 20)
    p = torch.rand(5, 200, generator=generator, dtype=torch.float64)
    q = p.clone()
    q[:, 40:70] *= 3  # thirty tokens have a deficit
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    distributions = []
    for width in (32, 200):
        rule = Bounded(table, k=20, width=width)
        found = rule.relax(p.log(), q.log(), depths=torch.zeros(5, dtype=torch.long), levels=1)
        distributions.append(found.log_r.exp())
        assert (found.total_variation > 0.01).all()
    assert (distributions[0] - distributions[1]).abs().max() < TOLERANCE


def test_single_precision_keeps_delta_to_rounding() -> None:
    generator = torch.Generator().manual_seed(6)
    table = proximity_table(torch.randn(300, 4, generator=generator), 50)
    log_p = (torch.randn(40, 300, generator=generator) * 2).log_softmax(-1)
    log_q = (torch.randn(40, 300, generator=generator) * 2).log_softmax(-1)
    for delta in (0.01, 0.1, 0.3):
        found = Bounded(table, delta=delta, width=300).relax(
            log_p, log_q, depths=torch.zeros(40, dtype=torch.long), levels=1
        )
        realised = (found.log_r.double().exp() - log_p.double().exp()).abs().sum(1) / 2
        assert (found.total_variation <= delta).all()
        assert (realised <= delta + 1e-6).all() and (realised - found.total_variation).abs().max() < 1e-6


def test_the_greedy_budget_is_capped_both_ways() -> None:
    table = proximity_table(torch.arange(4.0)[:, None], 3)
    own = torch.tensor([0.01, 0.05, 0.3])
    assert Bounded(table, k=3, delta=0.2, cap=4).budget(own).tolist() == pytest.approx([0.03, 0.15, 0.2])


def test_neighbours_are_nearest_first_and_the_lowest_among_equals() -> None:
    codebook = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.5, 0.0]])
    assert neighbours.proximity_table(codebook, 3).tolist() == [[1, 3, 2], [3, 0, 2], [0, 1, 3], [1, 0, 2]]
    codebook = torch.tensor([[0.0], [1.0], [-1.0], [1.0], [1.0]])
    assert neighbours.proximity_table(codebook, 3)[0].tolist() == [1, 2, 3]
    assert neighbours.proximity_table(codebook, 4)[3].tolist() == [1, 4, 0, 2]


@pytest.mark.parametrize(("tokens", "k", "values"), [(300, 7, 1000), (300, 40, 9), (60, 59, 3), (500, 100, 2)])
def test_selection_is_that_of_a_stable_sort(tokens: int, k: int, values: int) -> None:
    """With few values many tokens are as near as the k-th, more than the selection sorts."""
    distances = torch.randint(values, (20, tokens), generator=torch.Generator().manual_seed(0)).double()
    distances[:, 3] = torch.inf
    assert torch.equal(neighbours.nearest(distances, k), distances.sort(dim=1, stable=True).indices[:, :k])


def test_tables_hold_all_other_tokens_and_distances_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    table = neighbours.proximity_table(codebook, 49)
    distances = neighbours.proximity_distances(codebook, table)
    assert all(set(row) == set(range(50)) - {i} for i, row in enumerate(table.tolist()))
    assert torch.allclose(distances, torch.cdist(codebook, codebook).gather(1, table.long()), atol=1e-5)
    assert (distances.diff(dim=1) >= 0).all()
    monkeypatch.setattr(neighbours, "BLOCK", 7)
    assert torch.equal(neighbours.proximity_table(codebook, 49), table)
    assert torch.equal(neighbours.proximity_table(codebook, 5), table[:, :5])
    assert torch.equal(neighbours.proximity_distances(codebook, table), distances)
    refused(neighbours.proximity_distances, codebook[:49], table, match="has 49 tokens, the proximity table 50")
    for k in (0, 50, 2000):
        refused(neighbours.proximity_table, codebook, k, match=f"k is {k}, wanted from 1 to 49")


def test_prefix_stops_at_the_first_token_over_the_budget() -> None:
    masses = torch.tensor([[0.1, 0.2, 0.0, 0.5, 0.01]])
    taken, mass = neighbours.longest_prefix(masses, torch.tensor([0.35]))
    assert taken.tolist() == [[True, True, True, False, False]]  # 0.01 would fit, but lies behind 0.5
    assert mass.item() == pytest.approx(0.3)
    taken, mass = neighbours.longest_prefix(masses, torch.tensor([0.05]))
    assert not taken.any() and mass.item() == 0
