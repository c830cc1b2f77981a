"""Trees that were changed after sampling are detected: each fails a check that its correct twin passes."""

from dataclasses import replace

import pytest
import torch

from lantern.core.types import DraftMode, DraftTree
from lantern.drafters.trees.static import StaticTree
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof import draws, enumeration
from tests.proof.enumeration import Spoil
from tests.proof.worlds import world

CLEAN, FAULTY = 1e-9, 1e-3  # of total variation, enumerated
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


@pytest.mark.parametrize(
    ("mutant", "twin", "tree", "mode"),
    [
        (sharpened, None, TREE, "sampled"),
        (sharpened, None, TREE, "iid"),
        (sorted_again, None, FAN, "sampled"),
        (sorted_again, None, PAIR, "sampled"),
        (pruned, two_of_three, FAN, "sampled"),
        (pruned, two_of_three, FAN, "iid"),
    ],
)
def test_spoiled_draft_is_detected(mutant: Spoil, twin: Spoil | None, tree: StaticTree, mode: DraftMode) -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=twin) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=mutant) > FAULTY


@pytest.mark.parametrize("mutant", [sharpened, sorted_again, pruned])
def test_gumbel_match_is_exact_for_spoiled_drafts(mutant: Spoil) -> None:
    sampled = draws.draw(TOY, GumbelVerifier(), "gumbel", FAN, spoil=mutant)
    assert sampled.unlike_plain == 0 and sampled.p_value(TOY.distribution()) > 1e-4


def test_samples_without_replacement_verified_as_independent_are_detected() -> None:
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN) < CLEAN
    assert enumeration.distance(TOY, RejectionVerifier(), "sampled", FAN, believed="iid") > FAULTY


@pytest.mark.parametrize(("reported", "mode"), [("sampled", "iid"), ("point", "sampled"), ("point", "iid")])
def test_compatible_modes_are_exact(reported: DraftMode, mode: DraftMode) -> None:
    """Independent samples without repetitions are samples without replacement; point drafts may come from anywhere."""
    assert enumeration.distance(TOY, RejectionVerifier(), mode, FAN, believed=reported) < CLEAN
