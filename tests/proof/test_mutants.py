"""What breaks exactness is seen: each mutant fails the check that its twin without the fault passes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.noise import Purpose
from lantern.trees.static import StaticTree
from lantern.types import DraftMode, DraftTree, Leftovers, NoiseSource, Verdict
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import Outcome, RejectionVerifier
from tests.proof import draws, enumeration
from tests.proof.worlds import RawLeaves, World, processed_world, world

CLEAN, FAULTY = 1e-9, 1e-3  # of total variation, enumerated
PLAUSIBLE, IMPOSSIBLE = 1e-4, 1e-9  # of p-values, drawn
FAN, PAIR = StaticTree(((0,), (1,), (2,))), StaticTree(((0,), (1,)))
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))
RUNS = 200_000
TOY = world("generic", 7, codes=5)


def sharpened(draft: DraftTree) -> DraftTree:
    """The law recorded is not the one drawn from."""
    assert draft.log_q is not None
    return replace(draft, log_q=(draft.log_q * 2).log_softmax(-1))


def sorted_again(draft: DraftTree) -> DraftTree:
    """Siblings in order of their own q instead of the order in which they were drawn."""
    assert draft.log_q is not None
    best = draft.log_q[:, 0].gather(1, draft.tokens[:, 1:]).sort(dim=-1, descending=True, stable=True).indices
    return replace(draft, tokens=torch.cat([draft.tokens[:, :1], draft.tokens[:, 1:].gather(1, best)], 1))


def pruned(draft: DraftTree) -> DraftTree:
    """Of three siblings the one of least q is taken out after it was drawn."""
    assert draft.log_q is not None
    own = draft.log_q[:, 0].gather(1, draft.tokens[:, 1:])
    kept = (torch.arange(3) != own.argmin(-1, keepdim=True)).nonzero()[:, 1].view(-1, 2)
    tokens = torch.cat([draft.tokens[:, :1], draft.tokens[:, 1:].gather(1, kept)], 1)
    return replace(draft, tokens=tokens, shape=PAIR.shape(), log_q=draft.log_q[:, :3])


def two_of_three(draft: DraftTree) -> DraftTree:
    """The last of three siblings is taken out whatever it is: a draw less, which costs nothing."""
    assert draft.log_q is not None
    return replace(draft, tokens=draft.tokens[:, :3], shape=PAIR.shape(), log_q=draft.log_q[:, :3])


def untouched(draft: DraftTree) -> DraftTree:
    return draft


Spoil = Callable[[DraftTree], DraftTree]


@pytest.mark.parametrize(
    ("mutant", "twin", "tree", "mode"),
    [
        (sharpened, untouched, TREE, "sampled"),
        (sharpened, untouched, TREE, "iid"),
        (sorted_again, untouched, FAN, "sampled"),
        (sorted_again, untouched, PAIR, "sampled"),
        (pruned, two_of_three, FAN, "sampled"),
        (pruned, two_of_three, FAN, "iid"),
    ],
)
def test_a_spoilt_draft_is_not_exact(mutant: Spoil, twin: Spoil, tree: StaticTree, mode: DraftMode) -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=twin) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=mutant) > FAULTY


@pytest.mark.parametrize("mutant", [sharpened, sorted_again, pruned])
def test_gumbel_match_forgives_every_spoilt_draft(mutant: Spoil) -> None:
    drawn = draws.draw(TOY, GumbelVerifier(), "gumbel", FAN, spoil=mutant, runs=RUNS)
    assert drawn.unlike_plain == 0 and drawn.p_value(TOY.law()) > PLAUSIBLE


def test_draws_without_replacement_taken_for_independent_ones_are_not_exact() -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN, believed="iid") > FAULTY


@pytest.mark.parametrize(("told", "mode"), [("sampled", "iid"), ("point", "sampled"), ("point", "iid")])
def test_some_modes_may_be_taken_for_others(told: DraftMode, mode: DraftMode) -> None:
    """Independent draws, repetitions passed over, are draws without replacement; a point may come from anywhere."""
    assert enumeration.distance(TOY, RejectionVerifier(), mode, FAN, believed=told) < CLEAN


def test_raw_logits_at_a_leaf_are_not_exact() -> None:
    toy = processed_world()
    mutant = RawLeaves(toy.p, toy.q, toy.count, toy.raw)
    assert enumeration.distance(toy, RejectionVerifier(), "sampled", TREE) < CLEAN
    assert enumeration.distance(mutant, RejectionVerifier(), "sampled", TREE) > FAULTY
    assert p_value(GumbelVerifier(), "gumbel", toy) > PLAUSIBLE
    assert p_value(GumbelVerifier(), "gumbel", mutant) < IMPOSSIBLE


def p_value(verifier: GumbelVerifier | RejectionVerifier, mode: DraftMode = "sampled", toy: World = TOY) -> float:
    return draws.draw(toy, verifier, mode, PAIR, runs=RUNS).p_value(toy.law())


class Ungated(RejectionVerifier):
    """Tests every sibling whatever became of the ones before it, and keeps the last that passes."""

    def _test(
        self,
        before: Outcome,
        child: Int[Tensor, " b"],
        code: Int[Tensor, " b"],
        q: Float[Tensor, "b v"],
        threshold: Float[Tensor, " b"],
        is_tested: Tensor,
        mode: str,
    ) -> Outcome:
        still = replace(before, is_accepted=torch.zeros_like(before.is_accepted))
        after = super()._test(still, child, code, q, threshold, is_tested | (before.is_accepted & (child > 0)), mode)
        return replace(after, is_accepted=before.is_accepted | after.is_accepted)


class RefusalForgotten(RejectionVerifier):
    """Draws the next code from p where it should draw from what the refusals left."""

    def test_children(
        self,
        tree: DraftTree,
        node: Int[Tensor, " b"],
        p: Float[Tensor, "b v"],
        q: Float[Tensor, "b v"] | None,
        uniforms: Float[Tensor, "b w"],
        is_alive: Tensor,
    ) -> Outcome:
        return replace(super().test_children(tree, node, p, q, uniforms, is_alive), left=p)


class DraftersNoise(RejectionVerifier):
    """Draws what the refusals left by the noise that chose the refused codes."""

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        return (log_p + noise.gumbel(positions, Purpose.DRAFT)).argmax(-1)


class RootsRow(RejectionVerifier):
    """Draws the bonus code at a leaf from the law that follows the root."""

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        verdict = super().walk(tree, log_p, positions, noise)
        wrong = self.draw(log_p[:, :1], positions[:, -1:], noise)[:, 0]
        is_leaf = verdict.length == tree.shape.depth
        return replace(verdict, next_token=torch.where(is_leaf, wrong, verdict.next_token))


class GumbelOfRootsRow(GumbelVerifier):
    """Hands over the root's draw as the bonus code."""

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        verdict = super().walk(tree, log_p, positions, noise)
        return replace(verdict, next_token=self.draw(log_p, positions, noise)[:, 0])


@pytest.mark.parametrize("mutant", [Ungated(), RefusalForgotten(), DraftersNoise(), RootsRow()])
def test_a_faulty_rejection_is_not_exact(mutant: RejectionVerifier) -> None:
    assert p_value(RejectionVerifier()) > PLAUSIBLE
    assert p_value(mutant) < IMPOSSIBLE


def test_enumeration_refuses_a_walk_that_it_does_not_describe() -> None:
    with pytest.raises(AssertionError, match="one by one"):
        enumeration.distance(TOY, Ungated(), "sampled", FAN)


def test_a_gumbel_bonus_from_the_wrong_row_is_not_exact() -> None:
    assert p_value(GumbelVerifier(), "gumbel") > PLAUSIBLE
    assert p_value(GumbelOfRootsRow(), "gumbel") < IMPOSSIBLE


class OldLaw(CouplingVerifier):
    """Records for codes that were kept the law that they were first drawn from, as released code does."""

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        verdict = super().walk(tree, log_p, positions, noise)
        left = verdict.leftovers
        assert left is not None and left.log_q is not None and tree.log_q is not None
        is_kept = torch.nn.functional.pad(left.tokens[:, :-1] == tree.tokens[:, 1:], (0, 1))
        recorded = torch.where(is_kept[..., None], tree.log_q, left.log_q)
        return replace(verdict, leftovers=Leftovers(left.tokens, recorded))


class SameUniforms(CouplingVerifier):
    """Tests a code in every turn by the same uniforms."""

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        class Still:
            gumbel = noise.gumbel

            def uniform(self, positions: Tensor, lanes: int, **others: object) -> Tensor:
                return noise.uniform(positions, lanes)

        return super().walk(tree, log_p, positions, Still())  # type: ignore[arg-type]


@pytest.mark.parametrize("mutant", [OldLaw(), SameUniforms()])
def test_a_faulty_coupling_is_not_exact(mutant: CouplingVerifier) -> None:
    toy = world("generic", 1, codes=3, count=4)
    for verifier, is_exact in ((CouplingVerifier(), True), (mutant, False)):
        found = draws.draw_windows(toy, verifier, 3, "random", runs=RUNS).p_value(toy.law())
        assert found > PLAUSIBLE if is_exact else found < IMPOSSIBLE
