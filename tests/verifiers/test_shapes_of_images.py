"""Batches of different trees are verified and counted like each tree alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lantern.core.types import DraftMode, DraftTree, TreeShape, Verdict, Verifier
from lantern.decoding.statistics import Statistics
from lantern.drafters.trees.static import StaticTree
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxed import RelaxedVerifier
from tests.proof.draws import BulkNoise
from tests.proof.worlds import GivenRows
from tests.verifiers.toys import TOKENS, draw_tree, target_distribution, toy

# Trees with the same number of nodes and different shapes.
TREES = (
    StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))),
    StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0))),
    StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0))),
)
COPIES = 40
VERIFIERS: list[tuple[Verifier, DraftMode]] = [
    (GumbelVerifier(), "gumbel"),
    (RejectionVerifier(), "sampled"),
    (RejectionVerifier(), "point"),
    (
        RelaxedVerifier(
            Bounded(proximity_table(torch.arange(2.0 * TOKENS).view(-1, 2), 3), k=3, delta=0.2), GumbelVerifier()
        ),
        "gumbel",
    ),
]


NOISE = BulkNoise(COPIES * len(TREES), 8, TOKENS, 3)


def drafts(mode: DraftMode) -> list[DraftTree]:
    """Return forty drafts of each tree."""
    parts = torch.arange(COPIES * len(TREES)).view(len(TREES), COPIES)
    return [draw_tree(toy(), mode, NOISE.at(part), COPIES, tree) for part, tree in zip(parts, TREES, strict=True)]


def together(drafts: list[DraftTree]) -> DraftTree:
    """Return all drafts as one batch."""

    def stacked(name: str) -> Tensor:
        return torch.cat([getattr(d.shape, name).expand(COPIES, *getattr(d.shape, name).shape) for d in drafts])

    widths = tuple(max(sizes) for sizes in zip(*[d.shape.widths for d in drafts], strict=True))
    shape = TreeShape(stacked("parents"), stacked("ranks"), stacked("depths"), stacked("ancestors"), widths)
    distributions = [d.log_q for d in drafts if d.log_q is not None]
    return DraftTree(torch.cat([d.tokens for d in drafts]), shape, drafts[0].mode, torch.cat(distributions))


def distribution(draft: DraftTree) -> Tensor:
    """Return log p of what follows each node, for every shape."""
    own = replace(draft, shape=replace(draft.shape, depths=torch.ones(1, 1, dtype=torch.long)))
    log_p = target_distribution(toy(), own)
    is_root = (draft.shape.depths.expand(draft.tokens.shape) == 0)[..., None]
    return torch.where(is_root, toy().p.log(), log_p)


def walked(verifier: Verifier, draft: DraftTree, noise: BulkNoise) -> Verdict:
    places = draft.shape.depths.expand(draft.tokens.shape)
    return verifier.verify(draft, GivenRows(distribution(draft), places, noise), noise)


@pytest.mark.parametrize(("verifier", "mode"), VERIFIERS, ids=["gumbel", "sampled", "point", "bounded"])
def test_batches_of_different_trees_match_single_walks(verifier: Verifier, mode: DraftMode) -> None:
    parts = drafts(mode)
    both = walked(verifier, together(parts), NOISE)
    numbers = torch.arange(COPIES * len(TREES)).view(len(TREES), COPIES)
    for rows, draft in zip(numbers, parts, strict=True):
        alone = walked(verifier, draft, NOISE.at(rows))
        assert torch.equal(both.length[rows], alone.length) and torch.equal(both.next_token[rows], alone.next_token)
        taken = torch.arange(2) < alone.length[:, None]
        assert torch.equal(both.path[rows] * taken, alone.path * taken)
        if alone.cost is not None and both.cost is not None:
            assert torch.allclose(both.cost.total_variation[rows], alone.cost.total_variation)
    assert len(set(both.length.tolist())) > 1


def test_statistics_of_different_trees_match_those_of_each() -> None:
    parts = drafts("gumbel")
    start = torch.full((COPIES * len(TREES),), 3)
    batch = together(parts)
    numbers = torch.arange(len(start)).view(len(TREES), COPIES)
    found = counted(batch, NOISE, start)
    for rows, draft in zip(numbers, parts, strict=True):
        expected = counted(draft, NOISE.at(rows), start[rows])
        for name in ("steps", "accepted", "reached"):
            assert torch.equal(getattr(found, name)[rows], getattr(expected, name))


def counted(draft: DraftTree, noise: BulkNoise, start: Tensor) -> Statistics:
    """Return the sums over two steps with the same tree."""
    sums = Statistics(len(start), 2, 8, start.device)
    for _ in range(2):
        sums.enter(replace(draft.shape), walked(GumbelVerifier(), draft, noise), start)
    sums.add()
    return sums
