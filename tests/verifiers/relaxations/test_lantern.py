"""LANTERN and LANTERN++ by hand: acceptance, residuals, and variants."""

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Generation, Verifier
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import named
from lantern.verifiers.greedy import GreedyVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import Claim, proximity_distances, proximity_table
from lantern.verifiers.relaxations.rule import Ruling, Trial
from tests.proof.worlds import GivenRows
from tests.tiny import tiny_condition, tiny_eagle
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, generate, tiny_decoder, tiny_neighbours
from tests.verifiers.toys import TOKENS, distance, expected, outcome, toy

# Token 0's neighbours are 1, 2, 3, 4 in this order; p of it and of them:
LINE = proximity_table(torch.arange(5.0)[:, None], 4)
P = torch.tensor([[0.2, 0.1, 0.15, 0.25, 0.3]])
Q = torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]])
ZERO = torch.tensor([0])


def claim(rule: Lantern | LanternPP) -> Claim:
    return rule.claim(ZERO, P[:, 0], P.gather(1, rule.neighbours(ZERO)))


def judge(rule: Lantern | LanternPP, q: Tensor, is_point: bool) -> Ruling:
    return rule.judge(Trial(P, q, ZERO, is_point))


def test_lantern_claims_neighbours_up_to_delta() -> None:
    for delta, mass in ((0.05, 0.0), (0.1, 0.1), (0.24, 0.1), (0.26, 0.25), (1.0, 0.5)):
        rule = Lantern(LINE, k=3, delta=delta + 1e-6 if delta < 1 else 1.0)
        assert claim(rule).mass.item() == pytest.approx(mass, abs=1e-6)
        assert judge(rule, Q, False).mass.item() == pytest.approx(0.2 + mass, abs=1e-6)


def test_reach_is_the_mean_distance_of_claimed_mass() -> None:
    distances = proximity_distances(torch.arange(5.0)[:, None], LINE)
    assert distances[0].tolist() == [1, 2, 3, 4]
    assert judge(Lantern(LINE, k=3, delta=0.26), Q, False).reach is None
    ruling = judge(Lantern(LINE, k=3, delta=0.26, distances=distances), Q, False)
    assert ruling.reach is not None and ruling.reach.item() == pytest.approx((0.1 * 1 + 0.15 * 2) / 0.25)
    nothing = judge(Lantern(LINE, k=3, delta=0.0, distances=distances), Q, False)
    assert nothing.reach is not None and nothing.reach.item() == 0


def test_lantern_pp_claims_neighbours_in_proportion() -> None:
    for lambda_, mass in ((1.0, 0.0), (1.4, 0.0), (1.6, 0.1), (2.3, 0.25), (9.0, 0.5)):
        assert claim(LanternPP(LINE, k=3, lambda_=lambda_)).mass.item() == pytest.approx(mass, abs=1e-6)


def left(rule: Lantern | LanternPP, q: Tensor, is_point: bool) -> list[float]:
    return judge(rule, q, is_point).left[0].tolist()


def test_the_papers_residual_subtracts_q_from_the_distribution_with_mass_moved() -> None:
    rule = Lantern(LINE, k=3, delta=0.26)  # claims 1 and 2: p~ = .45 0 0 .25 .3
    assert left(rule, Q, False) == pytest.approx([0, 0, 0, 0.2, 0.25], abs=1e-6)
    point = torch.tensor([[1.0, 0, 0, 0, 0]])
    assert left(rule, point, True) == pytest.approx([0, 0, 0, 0.25, 0.3], abs=1e-6)


def test_released_residual_of_sampled_drafts_zeroes_q_on_k_plus_one_tokens() -> None:
    rule = Lantern(LINE, k=2, delta=0.11, residual="released")  # claims 1 only, zeroes q on 1, 2 and 3
    assert left(rule, Q, False) == pytest.approx([0, 0.1, 0.15, 0.25, 0.25], abs=1e-6)


def test_released_residual_of_point_drafts_zeroes_p_on_k_plus_one_tokens() -> None:
    rule = Lantern(LINE, k=2, delta=0.11, residual="released")
    point = torch.tensor([[1.0, 0, 0, 0, 0]])
    assert left(rule, point, True) == pytest.approx([0, 0, 0, 0, 0.3], abs=1e-6)


def test_empty_released_residual_is_uniform() -> None:
    rule = Lantern(LINE, k=3, delta=0.11, residual="released")
    point = torch.tensor([[1.0, 0, 0, 0, 0]])
    assert left(rule, point, True) == [1, 1, 1, 1, 1]


def test_the_released_residual_is_exact_where_no_neighbour_is_within_the_budget() -> None:
    rule = LanternPP(LINE, k=2, lambda_=1.1, residual="released")
    assert left(rule, Q, False) == pytest.approx((P - Q).clamp(min=0)[0].tolist())


@pytest.mark.parametrize("rule", [Lantern(LINE, k=3, delta=0.2), LanternPP(LINE, k=3, lambda_=3)])
def test_relaxation_accepts_more_and_is_not_exact(rule: Lantern | LanternPP) -> None:
    distributions = toy()
    assert not RejectionVerifier(rule).is_exact
    assert distance(outcome(distributions, RejectionVerifier(rule), "sampled"), expected(distributions)) > 0.02


TABLE = tiny_neighbours()


def decode(verifier: Verifier, sampling: Sampling = SAMPLING, mode: DraftMode = "sampled") -> Generation:
    tree = named("mc_sim_7b_63")
    drafter = EagleDrafter(tiny_eagle(TARGET), TARGET, tree=tree, mode=mode, sampling=sampling)
    condition, keys = tiny_condition((4, 1, 6, 3, 2, 5)), [(seed, 0) for seed in range(6)]
    return generate(drafter, verifier, condition=condition, sampling=sampling, keys=keys)


@pytest.mark.parametrize("residual", ["paper", "released"])
def test_relaxed_tokens_and_their_cost_are_counted(residual: str) -> None:
    exact = decode(RejectionVerifier())
    relaxed = decode(RejectionVerifier(Lantern(TABLE, k=10, delta=0.3, residual=residual)))
    assert exact.relaxed.sum() == 0 and exact.total_variation.sum() == 0
    assert 0 < relaxed.relaxed.sum() <= relaxed.accepted.sum()
    assert (relaxed.total_variation > 0).all()
    assert relaxed.total_variation_max is not None and relaxed.latent_distance is None
    assert (relaxed.total_variation_max <= 1).all()
    assert (relaxed.total_variation_max * 16 >= relaxed.total_variation).all()
    assert relaxed.tokens_per_step.mean() > exact.tokens_per_step.mean()


def test_zero_delta_is_lossless_through_the_loop() -> None:
    exact = decode(RejectionVerifier())
    assert torch.equal(decode(RejectionVerifier(Lantern(TABLE, k=10, delta=0))).tokens, exact.tokens)


def test_zero_delta_is_greedy_decoding_at_temperature_zero() -> None:
    sampling = Sampling(guidance=3, temperature=0)
    exact = decode(RejectionVerifier(), sampling, "point")
    relaxed = decode(GreedyVerifier(Lantern(TABLE, k=10, delta=0)), sampling, "point")
    assert torch.equal(relaxed.tokens, exact.tokens) and relaxed.relaxed.sum() == 0
    freer = decode(GreedyVerifier(Lantern(TABLE, k=10, delta=0.5)), sampling, "point")
    assert freer.relaxed.sum() > 0 and freer.steps.sum() < exact.steps.sum()


def test_greedy_relaxation_by_hand() -> None:
    from lantern.core.noise import Noise
    from lantern.drafters.trees.static import StaticTree

    tree = DraftTree(torch.tensor([[0, 2, 1, 4]]), StaticTree(((0,), (1,), (0, 0))).shape(), "point")
    distribution = torch.tensor([0.2, 0.1, 0.25, 0.15, 0.3]).log().expand(1, 4, -1)
    noise = Noise([(0, 0)], positions=4, vocab_size=TOKENS, is_silent=True)
    rows = GivenRows(distribution, torch.zeros(1, 4, dtype=torch.long), noise)
    verdict = GreedyVerifier(Lantern(LINE, k=1, delta=0.2)).verify(tree, rows, noise)
    # node 1 is token 2, which with 1's .1 has .35 > .3; node 2 is token 1, which with 0's .2 has .3 = .3 and a lower
    # index; node 3 is token 4, the arg-max itself. The deeper path is kept.
    assert verdict.length.tolist() == [2] and verdict.path.tolist() == [[1, 3]]
    assert verdict.next_token.tolist() == [4]
    assert verdict.cost is not None and verdict.cost.relaxed.tolist() == [[True, False]]
    assert verdict.cost.total_variation[0].tolist() == pytest.approx([0.1, 0, 0])


def test_siblings_that_share_a_budget_claim_what_is_left_of_it() -> None:
    rule = Lantern(LINE, k=3, delta=0.26, shared=True)
    trial = Trial(P, Q, ZERO, False, spent=torch.tensor([0.1]))
    assert rule.judge(trial).mass.item() == pytest.approx(0.2 + 0.1)
    assert Lantern(LINE, k=3, delta=0.26).judge(trial).mass.item() == pytest.approx(0.2 + 0.25)
    assert rule.judge(Trial(P, Q, ZERO, False, spent=torch.tensor([0.9]))).mass.item() == pytest.approx(0.2)


def test_the_excess_counts_what_tokens_spend_beyond_delta() -> None:
    """A wide tree tests several siblings a token, each with delta of its own, unless they share it."""
    excess = {}
    for shared in (False, True):
        parts = tiny_decoder("lantern-paper", delta=0.05, residual="paper", shared=shared)
        made = parts.generate(CONDITION, keys=KEYS)
        assert made.excess is not None
        assert (made.excess <= made.total_variation).all() and (made.total_variation <= made.excess + 16 * 0.05).all()
        excess[shared] = float(made.excess.sum())
    assert 0 <= excess[True] < excess[False]


def test_rules_without_a_bound_report_no_excess() -> None:
    assert tiny_decoder("eagle1").generate(CONDITION, keys=KEYS).excess is None
