"""Every exact pair of draft mode and verifier samples from the target's distribution, on every tree.

Trees that were changed after sampling are detected: each fails a check that its correct twin passes.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.core.types import DraftMode, DraftTree
from lantern.drafters.trees import Choice, StaticTree
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof import draws, enumeration
from tests.proof.enumeration import Spoil
from tests.proof.worlds import KINDS, TREES, world

MOST_DISTANCE, LEAST_P_VALUE = 1e-9, 1e-4
FAULTY = 1e-3
FEW_RUNS = 5000  # compared string by string
FAN, PAIR = StaticTree(((0,), (1,), (2,))), StaticTree(((0,), (1,)))
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))
TOY = world("generic", 7, tokens=5)
REJECTED: list[DraftMode] = ["point", "sampled", "iid"]
TOKENS_OF = {"disjoint": 4}  # p is positive on half of them


@pytest.mark.parametrize("mode", REJECTED)
@pytest.mark.parametrize("tree", TREES)
def test_rejection_matches_target_distribution(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        assert enumeration.distance(world(kind), RejectionVerifier(), mode, TREES[tree]) < MOST_DISTANCE


def grow(lots: list[int]) -> StaticTree:
    """Return a tree in which each new node has a random parent."""
    nodes: list[Choice] = [()]
    for lot in lots:
        parent = nodes[lot % len(nodes)]
        nodes.append((*parent, sum(node[:-1] == parent for node in nodes if node)))
    return StaticTree(tuple(nodes[1:]))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lots=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    mode=st.sampled_from(REJECTED),
    kinds=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([(3, 3), (4, 2), (5, 2), (6, 1)]),  # tokens, and how many an image has
)
def test_rejection_is_exact_on_random_trees(
    lots: list[int], mode: DraftMode, kinds: str, seed: int, size: tuple[int, int]
) -> None:
    toy = world(kinds, seed, tokens=size[0], count=size[1])
    assert enumeration.distance(toy, RejectionVerifier(), mode, grow(lots)) < MOST_DISTANCE


@pytest.mark.parametrize("mode", REJECTED)
def test_rejection_matches_target_distribution_over_several_steps(mode: DraftMode) -> None:
    for toy, tree in ((world("zeros", 3, count=3), TREES["unbalanced"]), (TOY, PAIR)):
        sampled = draws.draw(toy, RejectionVerifier(), mode, tree)
        assert sampled.p_value(toy.distribution()) > LEAST_P_VALUE


@pytest.mark.parametrize("mode", ["gumbel", "point", "sampled", "iid"])
@pytest.mark.parametrize("tree", TREES)
def test_gumbel_match_equals_plain_decoding(mode: DraftMode, tree: str) -> None:
    for kind in KINDS:
        assert draws.draw(world(kind), GumbelVerifier(), mode, TREES[tree], runs=FEW_RUNS).unlike_plain == 0, kind


@pytest.mark.parametrize(("init", "kind"), [*(("random", kind) for kind in KINDS), ("repeat-left", "generic")])
@pytest.mark.parametrize("redraw", ["coupled", "independent", "reuse"])
def test_coupling_matches_target_distribution(redraw: str, init: str, kind: str) -> None:
    toy = world(kind, 1, tokens=TOKENS_OF.get(kind, 3), count=4)
    sampled = draws.draw_windows(toy, CouplingVerifier(redraw), 3, init)  # type: ignore[arg-type]
    assert sampled.unlike_plain > 0
    assert sampled.p_value(toy.distribution()) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["random", "repeat-left"])
def test_gumbel_windows_equal_plain_decoding(init: str, kind: str) -> None:
    toy = world(kind, 1, tokens=TOKENS_OF.get(kind, 3), count=4)
    assert draws.draw_windows(toy, GumbelVerifier(), 3, init, FEW_RUNS).unlike_plain == 0


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
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=twin) < MOST_DISTANCE
    assert enumeration.distance(TOY, RejectionVerifier(), mode, tree, spoil=mutant) > FAULTY


@pytest.mark.parametrize("mutant", [sharpened, sorted_again, pruned])
def test_gumbel_match_is_exact_for_spoiled_drafts(mutant: Spoil) -> None:
    sampled = draws.draw(TOY, GumbelVerifier(), "gumbel", FAN, spoil=mutant)
    assert sampled.unlike_plain == 0 and sampled.p_value(TOY.distribution()) > 1e-4


@pytest.mark.parametrize(
    ("mode", "believed", "is_exact"),
    [("iid", "sampled", True), ("sampled", "point", True), ("iid", "point", True), ("sampled", "iid", False)],
)
def test_drafts_pass_for_another_mode_unless_those_without_replacement_are_believed_independent(
    mode: DraftMode, believed: DraftMode, is_exact: bool
) -> None:
    """Independent samples without repetitions are samples without replacement; point drafts may come from anywhere."""
    found = enumeration.distance(TOY, RejectionVerifier(), mode, FAN, believed=believed)
    assert found < MOST_DISTANCE if is_exact else found > FAULTY
