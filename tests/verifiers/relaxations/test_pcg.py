"""PCG's distribution is that of its acceptance test, enumerated draft by draft and group by group."""

import pytest
import torch
from torch import Tensor

from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.pcg import Pcg
from tests.verifiers.relaxations.test_bounded import random_distribution, relax

CODES = 9


def rule_of(seed: int, k: int = 5, threshold: float = 0.2) -> Pcg:
    codebook = torch.randn(CODES, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Pcg(proximity_table(codebook, CODES - 1), codebook, k=k, threshold=threshold)


def groups_of(rule: Pcg) -> list[set[int]]:
    """Groups by the definition: the seed, and those of its k nearest codes with a cosine above the threshold."""
    unit = rule.codebook / rule.codebook.norm(dim=1, keepdim=True)
    near = [rule.table[seed, : rule.k].tolist() for seed in range(CODES)]
    return [{s} | {t for t in near[s] if float(unit[s] @ unit[t]) > rule.threshold} for s in range(CODES)]


def emitted(groups: list[set[int]], p: Tensor, q: Tensor) -> Tensor:
    """The joint distribution (group, code) of what one test emits."""
    share = [1 / sum(code in group for group in groups) for code in range(CODES)]
    mass = [[sum(float(probs[c]) * share[c] for c in group) for group in groups] for probs in (p, q)]
    joint, rejected = torch.zeros(CODES, CODES, dtype=torch.float64), 0.0
    for g, group in enumerate(groups):
        for code in group:
            drafted = float(q[code]) * share[code]
            accepted = min(1.0, mass[0][g] / mass[1][g]) if drafted else 0.0
            joint[g, code] += drafted * accepted
            rejected += drafted * (1 - accepted)
    left = [max(a - b, 0.0) for a, b in zip(*mass, strict=True)]
    for g, group in enumerate(groups):
        if rejected > 1e-15 and left[g] > 0:
            for code in group:
                joint[g, code] += rejected * left[g] / sum(left) * float(p[code]) * share[code] / mass[0][g]
    return joint


@pytest.mark.parametrize("seed", range(40))
def test_r_is_what_the_test_emits_and_groups_follow_the_target(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rule = rule_of(seed)
    p, q = (random_distribution(CODES, generator) for _ in range(2))
    groups, found = groups_of(rule), relax(rule, p, q)
    joint = emitted(groups, p, q)
    assert torch.allclose(found.log_r[0].exp(), joint.sum(0), atol=1e-6)
    assert float(found.total_variation) == pytest.approx(float((joint.sum(0) - p).abs().sum() / 2), abs=1e-6)
    share = torch.tensor([1 / sum(code in group for group in groups) for code in range(CODES)])
    wanted = torch.stack([sum(p[c] * share[c] for c in group) for group in groups])  # type: ignore[arg-type]
    assert torch.allclose(joint.sum(1), wanted.double(), atol=1e-6)
    assert found.latent_distance is not None and float(found.latent_distance) >= 0


def test_it_accepts_more_than_an_exact_test_and_moves_mass_no_farther_than_it_says() -> None:
    gained = 0
    for seed in range(40):
        generator, rule = torch.Generator().manual_seed(seed), rule_of(seed)
        p, q = (random_distribution(CODES, generator) for _ in range(2))
        found = relax(rule, p, q)
        r = found.log_r[0].exp()
        gained += float(torch.minimum(r, q).sum() - torch.minimum(p, q).sum())
        # any coordinate's mean moves at most as far as the mass does
        shift = ((r - p) @ rule.codebook).norm()
        assert found.latent_distance is not None and float(shift) <= float(found.latent_distance) + 1e-6
    assert gained > 1


@pytest.mark.parametrize(("k", "threshold"), [(0, 0.2), (5, 1.0)])
def test_groups_of_one_code_are_exact_decoding(k: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (random_distribution(CODES, generator).float() for _ in range(2))
    found = relax(rule_of(3, k, threshold), p, q)
    assert torch.allclose(found.log_r[0].exp(), p, atol=1e-7) and float(found.total_variation) < 1e-6


def test_a_draft_from_the_target_changes_nothing() -> None:
    p = random_distribution(CODES, torch.Generator().manual_seed(5))
    assert torch.equal(relax(rule_of(5), p, p).log_r[0], p.log())
