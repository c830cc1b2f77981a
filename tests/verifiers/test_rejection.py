"""Multi-round rejection: exact in law, and its mutants are not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lantern.noise import Purpose
from lantern.trees.static import StaticTree
from lantern.types import DraftMode, DraftTree
from lantern.verifiers.rejection import Outcome, RejectionVerifier
from tests.verifiers.toys import TREE, Toy, distance, expected, outcome, toy

TOLERANCE = 0.01  # the estimate is off by about 0.006 on average
FLAT = StaticTree(((0,), (1,), (2,)))


@pytest.mark.parametrize("mode", ["sampled", "iid", "point"])
@pytest.mark.parametrize("shape", [TREE, FLAT, StaticTree(((0,), (0, 0)))])
def test_the_law_is_the_targets(mode: DraftMode, shape: StaticTree) -> None:
    laws = toy()
    assert distance(outcome(laws, RejectionVerifier(), mode, shape=shape), expected(laws)) < TOLERANCE


def test_codes_that_q_cannot_draw_are_passed_over() -> None:
    laws = toy()
    narrow = torch.tensor([0.7, 0.3, 0.0, 0.0, 0.0])
    laws = replace(laws, q=narrow, q_next=narrow.expand(5, -1))
    assert distance(outcome(laws, RejectionVerifier(), "sampled"), expected(laws)) < TOLERANCE


def test_a_code_that_the_target_cannot_draw_is_never_accepted() -> None:
    laws = toy()
    laws = replace(laws, q_next=torch.eye(5)[[1, 0, 0, 0, 0]] * 0.9 + 0.02)
    assert laws.p_next[0, 1] == 0
    assert outcome(laws, RejectionVerifier(), "sampled")[0, 1] == 0


def test_the_law_at_temperature_zero_is_the_argmax() -> None:
    laws = toy()
    hot = torch.nn.functional.one_hot
    greedy = replace(laws, p=hot(laws.p.argmax(), 5).float(), p_next=hot(laws.p_next.argmax(-1), 5).float())
    for mode in ("point", "sampled"):
        assert torch.equal(outcome(greedy, RejectionVerifier(), mode, runs=2000), expected(greedy))


LOPSIDED = replace(toy(), p=torch.tensor([0.02, 0.4, 0.4, 0.1, 0.08]), q=torch.tensor([0.5, 0.3, 0.15, 0.03, 0.02]))


def mutant_distance(
    verifier: RejectionVerifier, mode: DraftMode, shape: StaticTree = TREE, laws: Toy | None = None, **spoil: object
) -> float:
    laws = laws or toy()
    return distance(outcome(laws, verifier, mode, shape=shape, **spoil), expected(laws))  # type: ignore[arg-type]


def test_a_wrong_q_is_not_exact() -> None:
    def spoil(tree: DraftTree) -> DraftTree:
        assert tree.log_q is not None
        return replace(tree, log_q=(tree.log_q * 0.5).log_softmax(-1))

    assert mutant_distance(RejectionVerifier(), "sampled", spoil=spoil) > 2 * TOLERANCE


def test_siblings_sorted_again_are_not_exact() -> None:
    def spoil(tree: DraftTree) -> DraftTree:
        assert tree.log_q is not None
        best = tree.log_q[:, 0].gather(1, tree.tokens[:, 1:]).argsort(-1, descending=True)
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].gather(1, best)], 1))

    assert mutant_distance(RejectionVerifier(), "sampled", FLAT, spoil=spoil) > 2 * TOLERANCE


def test_draws_without_replacement_taken_for_independent_ones_are_not_exact() -> None:
    def spoil(tree: DraftTree) -> DraftTree:
        return replace(tree, mode="iid")

    assert mutant_distance(RejectionVerifier(), "sampled", laws=LOPSIDED, spoil=spoil) > 2 * TOLERANCE


def test_siblings_tested_without_waiting_for_refusals_are_not_exact() -> None:
    class Ungated(RejectionVerifier):
        """Accepts each sibling on its own against p, and keeps the last."""

        def _test(self, before: Outcome, child: Tensor, code: Tensor, q: Tensor, threshold: Tensor, *rest: object):  # type: ignore[no-untyped-def, override]
            is_accepted = threshold < before.left.gather(1, code[:, None])[:, 0]
            return replace(
                before,
                is_accepted=before.is_accepted | is_accepted,
                taken=torch.where(is_accepted, child, before.taken),
            )

    assert mutant_distance(Ungated(), "sampled", FLAT) > 2 * TOLERANCE


def test_a_bonus_from_p_in_place_of_the_residual_is_not_exact() -> None:
    class Mutant(RejectionVerifier):
        def test_children(self, tree: DraftTree, node: Tensor, p: Tensor, *rest: object) -> Outcome:  # type: ignore[override]
            return replace(super().test_children(tree, node, p, *rest), left=p)  # type: ignore[arg-type]

    assert mutant_distance(Mutant(), "sampled") > 2 * TOLERANCE


def test_drawing_the_bonus_by_the_drafters_noise_is_not_exact() -> None:
    class Mutant(RejectionVerifier):
        def draw(self, log_p: Tensor, positions: Tensor, noise: object) -> Tensor:  # type: ignore[override]
            return (log_p + noise.gumbel(positions, Purpose.DRAFT)).argmax(-1)  # type: ignore[attr-defined]

    assert mutant_distance(Mutant(), "sampled", StaticTree(((0,),)), LOPSIDED) > 2 * TOLERANCE


def test_a_law_relaxation_is_refused() -> None:
    class Law:
        def relax(self, log_p: Tensor, log_q: Tensor) -> Tensor:
            return log_q

    with pytest.raises(Exception, match="use RelaxedVerifier|Expected type"):
        RejectionVerifier(Law())  # type: ignore[arg-type]
