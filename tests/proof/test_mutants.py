"""Faults that break exactness are detected: each mutant fails a check that its correct twin passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.noise import Noise, Purpose
from lantern.core.types import DraftMode, DraftTree, Rows, Verdict
from lantern.drafters.trees.static import StaticTree
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import Numbers, Outcome, RejectionVerifier, normalised
from tests.proof import draws, enumeration
from tests.proof.worlds import RawLeaves, World, processed_world, world

CLEAN, FAULTY = 1e-9, 1e-3  # of total variation, enumerated
PLAUSIBLE, IMPOSSIBLE = 1e-4, 1e-9  # of p-values, sampled
FAN, PAIR = StaticTree(((0,), (1,), (2,))), StaticTree(((0,), (1,)))
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))
TOY = world("generic", 7, tokens=5)


def sharpened(draft: DraftTree) -> DraftTree:
    """Record another distribution than the one sampled from."""
    return replace(draft, log_q=(draft.log_q * 2).log_softmax(-1))


def sorted_again(draft: DraftTree) -> DraftTree:
    """Order siblings by q instead of by the order of sampling."""
    best = draft.log_q[:, 0].gather(1, draft.tokens[:, 1:]).sort(dim=-1, descending=True, stable=True).indices
    return replace(draft, tokens=torch.cat([draft.tokens[:, :1], draft.tokens[:, 1:].gather(1, best)], 1))


def pruned(draft: DraftTree) -> DraftTree:
    """Remove the sibling of least q after sampling."""
    own = draft.log_q[:, 0].gather(1, draft.tokens[:, 1:])
    kept = (torch.arange(3) != own.argmin(-1, keepdim=True)).nonzero()[:, 1].view(-1, 2)
    tokens = torch.cat([draft.tokens[:, :1], draft.tokens[:, 1:].gather(1, kept)], 1)
    return replace(draft, tokens=tokens, shape=PAIR.shape(), log_q=draft.log_q[:, :3])


def two_of_three(draft: DraftTree) -> DraftTree:
    """Remove the last of three siblings, which keeps exactness: it is one sample less."""
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
def test_spoiled_draft_is_detected(mutant: Spoil, twin: Spoil, tree: StaticTree, mode: DraftMode) -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=twin) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=mutant) > FAULTY


@pytest.mark.parametrize("mutant", [sharpened, sorted_again, pruned])
def test_gumbel_match_is_exact_for_spoiled_drafts(mutant: Spoil) -> None:
    sampled = draws.draw(TOY, GumbelVerifier(), "gumbel", FAN, spoil=mutant)
    assert sampled.unlike_plain == 0 and sampled.p_value(TOY.distribution()) > PLAUSIBLE


def test_samples_without_replacement_verified_as_independent_are_detected() -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN, believed="iid") > FAULTY


@pytest.mark.parametrize(("reported", "mode"), [("sampled", "iid"), ("point", "sampled"), ("point", "iid")])
def test_compatible_modes_are_exact(reported: DraftMode, mode: DraftMode) -> None:
    """Independent samples without repetitions are samples without replacement; point drafts may come from anywhere."""
    assert enumeration.distance(TOY, RejectionVerifier(), mode, FAN, believed=reported) < CLEAN


def test_raw_logits_at_a_leaf_are_detected() -> None:
    toy = processed_world()
    mutant = RawLeaves(toy.p, toy.q, toy.count, toy.raw)
    assert enumeration.distance(toy, RejectionVerifier(), "sampled", TREE) < CLEAN
    assert enumeration.distance(mutant, RejectionVerifier(), "sampled", TREE) > FAULTY
    assert p_value(GumbelVerifier(), "gumbel", toy) > PLAUSIBLE
    assert p_value(GumbelVerifier(), "gumbel", mutant) < IMPOSSIBLE


def p_value(verifier: GumbelVerifier | RejectionVerifier, mode: DraftMode = "sampled", toy: World = TOY) -> float:
    return draws.draw(toy, verifier, mode, PAIR).p_value(toy.distribution())


class Ungated(RejectionVerifier):
    """Tests every sibling regardless of earlier results, and keeps the last that passes."""

    def test_children(
        self, tree: DraftTree, numbers: Numbers, children: Tensor, p: Tensor, q: Tensor, uniforms: Tensor, is_open: Any
    ) -> Outcome:
        found, tokens = Outcome(numbers.full(0), p, numbers.full(False), None, None), tree.tokens
        for child, uniform in zip(children.split(1, 1), uniforms.split(1, 1), strict=True):
            one = super().test_children(tree, numbers, child, found.left, q, uniform, is_open)
            found = replace(one, taken=torch.where(one.taken > 0, one.taken, found.taken))
            q = normalised(q.scatter(1, tokens.gather(1, child), 0.0), q)
        return found


class RefusalForgotten(RejectionVerifier):
    """Samples the next token from p instead of from the residual distribution."""

    def test_children(self, tree: DraftTree, numbers: Numbers, children: Tensor, p: Tensor, *others: Any) -> Outcome:
        return replace(super().test_children(tree, numbers, children, p, *others), left=p)


class DraftersNoise(RejectionVerifier):
    """Samples the residual with the noise that chose the refused tokens."""

    def draw(self, log_p: Tensor, places: Tensor, noise: Noise, may_stop: bool = False) -> Tensor:
        return (log_p + noise.gumbel(places, Purpose.DRAFT)).argmax(-1)


class RootsRow(RejectionVerifier):
    """Samples the bonus token at a leaf from the root's distribution."""

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        verdict = super().verify(tree, rows, noise)
        wrong = self.draw(rows.log_p()[:, :1], rows.places[:, -1:], noise)[:, 0]
        is_leaf = verdict.length == tree.shape.depth
        return replace(verdict, next_token=torch.where(is_leaf, wrong, verdict.next_token))


class GumbelOfRootsRow(GumbelVerifier):
    """Returns the root's sample as the bonus token."""

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        return replace(super().verify(tree, rows, noise), next_token=rows.sample()[:, 0])


@pytest.mark.parametrize("mutant", [Ungated(), RefusalForgotten(), DraftersNoise(), RootsRow()])
def test_faulty_rejection_is_detected(mutant: RejectionVerifier) -> None:
    assert p_value(RejectionVerifier()) > PLAUSIBLE
    assert p_value(mutant) < IMPOSSIBLE


def test_enumeration_rejects_a_walk_that_it_does_not_describe() -> None:
    with pytest.raises(AssertionError, match="one by one"):
        enumeration.distance(TOY, Ungated(), "sampled", FAN)


def test_gumbel_bonus_from_the_wrong_row_is_detected() -> None:
    assert p_value(GumbelVerifier(), "gumbel") > PLAUSIBLE
    assert p_value(GumbelOfRootsRow(), "gumbel") < IMPOSSIBLE


class OldDistribution(CouplingVerifier):
    """Records for kept tokens the distribution that they were first sampled from, as released code does."""

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        verdict = super().verify(tree, rows, noise)
        if tree.log_q is None:
            return verdict
        assert verdict.samples is not None and verdict.log_q is not None
        is_kept = torch.nn.functional.pad(verdict.samples[:, :-1] == tree.tokens[:, 1:], (0, 1))
        return replace(verdict, log_q=torch.where(is_kept[..., None], tree.log_q, verdict.log_q))


class SameUniforms(CouplingVerifier):
    """Tests a token with the same uniforms in every step."""

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        class Still:
            gumbel = noise.gumbel

            def uniform(self, positions: Tensor, lanes: int, **others: object) -> Tensor:
                return noise.uniform(positions, lanes)

        return super().verify(tree, rows, Still())  # type: ignore[arg-type]


@pytest.mark.parametrize("mutant", [OldDistribution(), SameUniforms()])
def test_faulty_coupling_is_detected(mutant: CouplingVerifier) -> None:
    toy = world("generic", 1, tokens=3, count=4)
    for verifier, is_exact in ((CouplingVerifier(), True), (mutant, False)):
        found = draws.draw_windows(toy, verifier, 3, "random").p_value(toy.distribution())
        assert found > PLAUSIBLE if is_exact else found < IMPOSSIBLE
