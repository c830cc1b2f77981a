"""Relaxations by hand: LANTERN, LANTERN++, GSD, typical acceptance, COOL-SD and VVS, and settings out of range."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftTree
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees import StaticTree, named
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped, Tolerance, Typical
from lantern.verifiers.relaxations.distributions import Bounded, Cool, Mixture, Vvs
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP, proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Ruling, UnderTest
from lantern.verifiers.relaxed import GreedyVerifier
from tests.proof.worlds import GivenRows
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_eagle
from tests.tiny_decoder import CONDITION, KEYS, TARGET, generate, tiny_decoder, tiny_neighbours

# Token 0's neighbours are 1, 2, 3, 4 in this order; p of it and of them:
VECTORS = torch.arange(5.0)[:, None]
LINE = proximity_table(VECTORS, 4)
P = torch.tensor([[0.2, 0.1, 0.15, 0.25, 0.3]])
Q = torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]])
POINT = torch.tensor([[1.0, 0, 0, 0, 0]])
ZERO = torch.tensor([0])


def judge(rule: Lantern | LanternPP, q: Tensor = Q) -> Ruling:
    return rule.judge(UnderTest(P, q, ZERO, q is POINT))


def left(rule: Lantern | LanternPP, q: Tensor = Q) -> Any:
    return pytest.approx(judge(rule, q).left[0].tolist(), abs=1e-6)


def test_lantern_claims_up_to_delta_lantern_pp_in_proportion_and_reach_is_their_distance() -> None:
    for delta, mass in ((0.05, 0.0), (0.1, 0.1), (0.24, 0.1), (0.26, 0.25), (1.0, 0.5)):
        rule = Lantern(LINE, k=3, delta=min(delta + 1e-6, 1.0))
        assert judge(rule).mass.item() == pytest.approx(0.2 + mass, abs=1e-6)
    for lambda_, mass in ((1.0, 0.0), (1.4, 0.0), (1.6, 0.1), (2.3, 0.25), (9.0, 0.5)):
        assert judge(LanternPP(LINE, k=3, lambda_=lambda_)).mass.item() == pytest.approx(0.2 + mass, abs=1e-6)
    distances = proximity_distances(VECTORS, LINE)
    assert distances[0].tolist() == [1, 2, 3, 4]
    assert judge(Lantern(LINE, k=3, delta=0.26)).reach is None
    found = [judge(Lantern(LINE, k=3, delta=delta, distances=distances)).reach for delta in (0.26, 0.0)]
    assert found == [pytest.approx((0.1 * 1 + 0.15 * 2) / 0.25), 0]


def test_residuals_are_those_of_the_paper_and_of_the_release() -> None:
    rule = Lantern(LINE, k=3, delta=0.26)  # claims 1 and 2: p~ = .45 0 0 .25 .3
    assert left(rule) == [0, 0, 0, 0.2, 0.25] and left(rule, POINT) == [0, 0, 0, 0.25, 0.3]
    rule = Lantern(LINE, k=2, delta=0.11, residual="released")  # claims 1 only, zeroes 1, 2 and 3
    assert left(rule) == [0, 0.1, 0.15, 0.25, 0.25] and left(rule, POINT) == [0, 0, 0, 0, 0.3]
    assert left(Lantern(LINE, k=3, delta=0.11, residual="released"), POINT) == [1] * 5  # an empty one is uniform
    exact = LanternPP(LINE, k=2, lambda_=1.1, residual="released")  # no neighbour is within the budget
    assert (P - Q).clamp(min=0)[0].tolist() == left(exact)


def test_siblings_that_share_a_budget_claim_what_is_left_of_it() -> None:
    rule = Lantern(LINE, k=3, delta=0.26, shared=True)
    for spent, mass, alone in ((0.1, 0.1, 0.25), (0.9, 0.0, 0.25)):
        trial = UnderTest(P, Q, ZERO, False, spent=torch.tensor([spent]))
        assert rule.judge(trial).mass.item() == pytest.approx(0.2 + mass)
        assert Lantern(LINE, k=3, delta=0.26).judge(trial).mass.item() == pytest.approx(0.2 + alone)


def test_the_excess_counts_what_tokens_spend_beyond_delta() -> None:
    """A wide tree tests several siblings a token, each with delta of its own, unless they share it."""
    excess = []
    for shared in (True, False):
        parts = tiny_decoder("lantern-paper", delta=0.05, residual="paper", shared=shared)
        made = parts.generate(CONDITION, keys=KEYS)
        assert (made.excess <= made.total_variation).all() and (made.total_variation <= made.excess + 16 * 0.05).all()
        excess.append(float(made.excess.sum()))
    assert 0 <= excess[0] < excess[1]


def test_zero_delta_is_greedy_decoding_at_temperature_zero() -> None:
    sampling, tree, table = Sampling(guidance=3, temperature=0), named("mc_sim_7b_63"), tiny_neighbours()
    drafter = EagleDrafter(tiny_eagle(TARGET), TARGET, tree=tree, mode="point", sampling=sampling)
    how: Any = {"condition": tiny_condition((4, 1, 6, 3, 2, 5)), "keys": [(seed, 0) for seed in range(6)]}
    exact, relaxed, freer = (
        generate(drafter, verifier, sampling=sampling, **how)
        for verifier in (
            RejectionVerifier(),
            GreedyVerifier(Lantern(table, k=10, delta=0)),
            GreedyVerifier(Lantern(table, k=10, delta=0.5)),
        )
    )
    assert torch.equal(relaxed.tokens, exact.tokens) and relaxed.relaxed.sum() == 0
    assert freer.relaxed.sum() > 0 and freer.steps.sum() < exact.steps.sum()


def test_greedy_relaxation() -> None:
    tree = DraftTree(torch.tensor([[0, 2, 1, 4]]), StaticTree(((0,), (1,), (0, 0))).shape(), "point")
    distribution = torch.tensor([0.2, 0.1, 0.25, 0.15, 0.3]).log().expand(1, 4, -1)
    noise = Noise([(0, 0)], positions=4, vocab_size=5, is_silent=True)
    rows = GivenRows(distribution, torch.zeros(1, 4, dtype=torch.long), noise)
    verdict = GreedyVerifier(Lantern(LINE, k=1, delta=0.2)).verify(tree, rows, noise)
    # node 1 is token 2, which with 1's .1 has .35 > .3; node 2 is token 1, which with 0's .2 has .3 = .3 and a lower
    # index; node 3 is token 4, the arg-max itself. The deeper path is kept.
    assert verdict.length.tolist() == [2] and verdict.path.tolist() == [[1, 3]]
    assert verdict.next_token.tolist() == [4]
    assert verdict.cost is not None and verdict.cost.relaxed.tolist() == [[True, False]]
    assert verdict.cost.total_variation.tolist() == [[1, 0, 0]]


ORDERED = torch.tensor([[0.05, 0.3, 0.1, 0.35, 0.2]])  # in order: 3 1 4 2 0
DRAFTED = torch.tensor([[0.1, 0.1, 0.2, 0.2, 0.4]])


@pytest.mark.parametrize(
    ("token", "settings", "mass"),
    [
        (4, {}, 0.4 * (0.3 + 0.2 + 0.1) / (0.1 + 0.4 + 0.2)),
        (3, {}, 0.2 * (0.35 + 0.3) / (0.2 + 0.1)),  # at the end of the order it has one side
        (4, {"group": 4}, 0.4),  # all tokens
        (4, {"p_radius": 0.1}, 0.2),
        (4, {"p_radius": 0.11}, 0.4 * (0.3 + 0.2 + 0.1) / 0.7),
        (4, {"d_radius": 2.5}, 0.4 * (0.2 + 0.1) / 0.6),  # 2 is near 4, 1 is not
    ],
)
def test_a_group_is_alike_neighbours_in_the_order_of_p(token: int, settings: dict[str, Any], mass: float) -> None:
    rule = Grouped(VECTORS, **({"group": 2, "p_radius": 1.0, "d_radius": 9.0} | settings))
    assert rule.judge(UnderTest(ORDERED, DRAFTED, torch.tensor([token]), False)).mass.item() == pytest.approx(mass)
    ruling = rule.judge(UnderTest(ORDERED, DRAFTED, ZERO, False))
    assert ruling.left[0].tolist() == pytest.approx([0, 0.2, 0, 0.15, 0])
    assert ruling.reach is not None and ruling.reach.item() == pytest.approx((0.2 * 1 + 0.15 * 3) / 0.35)


def test_distances_of_a_group_are_not_rounded_to_the_dtype_of_the_codebook() -> None:
    vectors = torch.tensor([[0], [0.5], [0], [0], [256]], dtype=torch.bfloat16)  # 4 is 255.5 from 1, in bf16 256
    rule = Grouped(vectors, group=2, p_radius=1.0, d_radius=255.75)
    assert rule.judge(UnderTest(ORDERED, DRAFTED, torch.tensor([4]), False)).mass.item() == pytest.approx(0.4)


@pytest.mark.parametrize(("epsilon", "bar"), [(1.0, 0.8 * math.exp((P * P.log()).sum().item())), (0.12, 0.12)])
def test_typical_drafts_are_accepted_above_the_lower_of_both_thresholds(epsilon: float, bar: float) -> None:
    for token in range(5):
        ruling = Typical(epsilon=epsilon, alpha=0.8).judge(
            UnderTest(P, one_hot(ZERO + token, 5).float(), ZERO + token, True)
        )
        assert ruling.mass.item() == float(P[0, token] > bar) and torch.equal(ruling.left, P)


def random_pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(12, generator=generator, dtype=torch.float64) * 2).softmax(0)
    q = (p.log() + torch.randn(12, generator=generator, dtype=torch.float64)).softmax(0)
    if seed % 3 == 0:
        p[seed % 12] = 0.0
    return p / p.sum(), q


@pytest.mark.parametrize("omega", [0.5, 1.0, 1.1, 2.0, 5.0])
def test_cool_matches_the_published_test(omega: float) -> None:
    """One draft accepted with f = min(1, omega p / q), else norm(max(p - q f, 0))."""
    codebook = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rule = Cool(omega=omega, nu=0, codebook=codebook)
    for seed in range(50):
        p, q = random_pair(seed)
        found = rule.relax(p.log()[None], q.log()[None], depths=ZERO, levels=5)
        r, taken = found.log_r[0].exp(), q * (omega * p / q).clamp(max=1.0)
        rest = (p - taken).clamp(min=0) if omega < 1 else (p - q).clamp(min=0)
        assert torch.allclose(r, taken + (1 - taken.sum()) * rest / rest.sum(), atol=1e-12)
        assert abs(float((r - p).abs().sum() / 2 - found.total_variation)) < 1e-12
        # One draft tested exactly against r is accepted as often as the published test accepts it.
        chance = (q * (max(omega, 1.0) * p / q).clamp(max=1.0)).sum()
        assert abs(float(torch.minimum(r, q).sum() - chance)) < 1e-12
        if omega == 2.0:  # the latent distance is an upper bound
            gained, lost = (r - p).clamp(min=0), (p - r).clamp(min=0)
            mean = gained @ torch.cdist(codebook, codebook) @ lost / lost.sum()
            assert mean <= found.latent_distance[0] + 1e-9 <= 1.5 * mean + 2e-9


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("cap", [1.0, 2.0, 1e6])
def test_a_mixture_spends_its_bound_on_acceptance(delta: float, cap: float) -> None:
    """TV(r, p) is delta or what there is to move, and sum min(r, q) exceeds sum min(p, q) by as much."""
    for seed in range(50):
        p, q = random_pair(seed)
        found = Mixture(delta, cap).relax(p.log()[None], q.log()[None], depths=ZERO, levels=1)
        r, spent = found.log_r[0].exp(), float(found.total_variation)
        movable = torch.minimum(q - p, (cap - 1) * p).clamp(min=0).sum()
        assert spent == pytest.approx(min(delta, float(movable)), abs=1e-12)
        assert float((r - p).abs().sum() / 2) == pytest.approx(spent, abs=1e-12)
        accepted = torch.minimum(r, q).sum() - torch.minimum(p, q).sum()
        assert float(accepted) == pytest.approx(spent, abs=1e-12)
        assert (r >= torch.minimum(p, q) - 1e-12).all() and (r <= torch.maximum(p, q) + 1e-12).all()
        assert (r[p == 0] < 1e-300).all()
        if cap > 2 and movable > 0:  # the same share of every difference
            share = ((r - p) / (q - p))[p > 0]
            gained = (q > p)[p > 0]
            for part in (share[gained], share[~gained]):
                assert torch.allclose(part, part[0].expand_as(part), atol=1e-9)


def test_cool_factors_anneal_with_mean_omega() -> None:
    factors = Cool(omega=1.1, nu=0.7).factors(5)
    assert sum(factors) / 5 == pytest.approx(1.1)
    assert [b / a for a, b in pairwise(factors)] == pytest.approx([math.exp(-0.7)] * 4)
    p, q = random_pair(1)
    rows = p.log().expand(3, -1), q.log().expand(3, -1)
    found = Cool(omega=1.5).relax(*rows, depths=torch.tensor([0, 1, 2]), levels=3)
    spent = found.total_variation.tolist()
    assert spent[0] > spent[1] > spent[2] == 0 and torch.equal(found.log_r[2], rows[0][2])


def test_vvs_is_q_above_the_depth_and_p_below_it() -> None:
    p, q = (torch.stack(of) for of in zip(*map(random_pair, (1, 2, 4)), strict=True))
    found = Vvs(skip=2).relax(p.log(), q.log(), depths=torch.tensor([0, 1, 2]), levels=4)
    assert torch.equal(found.log_r[:2], q[:2].log()) and torch.equal(found.log_r[2], p[2].log())
    spent = (p - q).clamp(min=0).sum(1).tolist()
    assert found.total_variation.tolist() == pytest.approx([*spent[:2], 0.0], abs=1e-6) and min(spent) > 0.1
    made = tiny_decoder("vvs", tree="spine_2_4_2", skip=2).generate(CONDITION, keys=KEYS)
    assert torch.equal(made.accepted[:, :2], made.reached[:, :2]) and (made.accepted[:, :2] > 0).all()
    assert (made.accepted[:, 2] < made.reached[:, 2]).all() and (made.total_variation > 0).all()


# what a rule needs, and settings that are refused
NEEDS: dict[Any, Any] = {rule: {"table": LINE, "k": 2} for rule in (Bounded, Lantern, LanternPP)}
NEEDS[Grouped] = {"codebook": VECTORS}
WRONG: dict[Any, dict[str, Any]] = {
    Bounded: {"delta": math.nan, "cap": 0.5, "rounds": 0, "width": 2.0},
    **{Mixture: {"delta": 2, "cap": 0.5}, Cool: {"omega": -1, "nu": math.inf}, Grouped: {"group": 3, "p_radius": -1}},
    **{Lantern: {"delta": 1.5}, LanternPP: {"lambda_": 0.5, "residual": "compat"}},
    **{Tolerance: {"samples": True}, Typical: {"alpha": -1}},
}


@pytest.mark.parametrize(
    ("rule", "name", "value"), [(rule, *wrong) for rule, settings in WRONG.items() for wrong in settings.items()]
)
def test_settings_out_of_range_raise(rule: Any, name: str, value: Any) -> None:
    refused(rule, **NEEDS.get(rule, {}) | {name: value}, match=f'{name} is "?{value}"?, wanted')


def test_sizes_out_of_range_are_refused_with_their_bounds() -> None:
    refused(Bounded, LINE, k=5, match="k is 5, wanted from 0 to 4")
    refused(Lantern, LINE, k=4, residual="released", match="wanted from 0 to 3")
    refused(Vvs, skip=33, match="skip is 33, wanted a whole number from 0 to 32")
