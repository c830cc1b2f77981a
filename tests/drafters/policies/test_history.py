"""The map of acceptance: neighbours of tokens, and updates by a step."""

import torch

from lantern.core.types import DraftTree, Step, TreeShape, Verdict
from lantern.decoding.loop import NO_SCORES
from lantern.drafters.policies.history import PRIOR, neighbours, updated_map

SIDE, TOKENS = 4, 16
EMPTY = torch.full((1, TOKENS + 1), PRIOR)


def chain_step(length: int, counts: int | None = None) -> Step:
    """A chain of two drafted tokens in one image, of which `length` were accepted."""
    shape = TreeShape(
        torch.tensor([[0, 0, 1]]),
        torch.tensor([[0, 0, 0]]),
        torch.tensor([[0, 1, 2]]),
        torch.ones(1, 3, 3).bool(),
        (1, 1),
    )
    tree = DraftTree(torch.zeros(1, 3, dtype=torch.long), shape, "gumbel")
    path = torch.tensor([[1, 2]]) * (torch.arange(2) < length)
    kept = torch.tensor([length + 1 if counts is None else counts])
    verdict = Verdict(path, torch.tensor([length]), torch.zeros(1, dtype=torch.long))
    return Step(1, torch.tensor([3]), kept, torch.zeros(1, 3, dtype=torch.long), NO_SCORES, tree, verdict)


def test_neighbours_are_the_left_upper_and_upper_right_tokens() -> None:
    seen = torch.arange(TOKENS + 1.0)[None]
    seen[0, TOKENS] = -1.0
    known = torch.tensor([16])

    def of(place: int, known: torch.Tensor = known) -> list[float]:
        return neighbours(seen, torch.tensor([[place]]), known, SIDE)[0, 0].tolist()

    assert of(6) == [5, 2, 3]
    assert of(0) == [-1, -1, -1] and of(2) == [1, -1, -1]
    assert of(4) == [-1, 0, 1] and of(7) == [6, 3, -1]
    assert of(10, torch.tensor([9])) == [8, 6, 7]  # tokens from 9 on are unknown: the last known one is used


def test_a_step_updates_only_tested_tokens() -> None:
    after = updated_map(EMPTY, chain_step(1), SIDE)  # tokens 3 and 4: accepted, then rejected
    assert after[0, 3] == 0.75 and after[0, 4] < 0.5
    assert (after[0, [i for i in range(TOKENS + 1) if i not in (3, 4)]] == PRIOR).all()
    after = updated_map(EMPTY, chain_step(2), SIDE)  # a bonus token behind a leaf is not tested
    assert after[0, 3] == 0.75 and after[0, 4] > 0.5 and after[0, 5] == PRIOR
    assert torch.equal(updated_map(EMPTY, chain_step(0, counts=0), SIDE), EMPTY)  # a finished image
