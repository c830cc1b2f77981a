"""Gumbel match: exact for any draft, and its mutants are not."""

import pytest
import torch
from torch import Tensor

from lantern.types import DraftMode, DraftTree, Verdict
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.path import deepest_path
from tests.verifiers.toys import TREE, distance, expected, outcome, toy

TOLERANCE = 0.01


@pytest.mark.parametrize("mode", ["gumbel", "sampled", "point"])
def test_the_law_is_the_targets(mode: DraftMode) -> None:
    laws = toy()
    assert distance(outcome(laws, GumbelVerifier(), mode), expected(laws)) < TOLERANCE


def test_pruning_after_the_fact_is_free() -> None:
    def prune(tree: DraftTree) -> DraftTree:
        tokens = tree.tokens.clone()
        tokens[:, 1] = tokens[:, 3]  # drops the best child for a copy of the worst
        return DraftTree(tokens, tree.shape, tree.mode, tree.log_q)

    laws = toy()
    assert distance(outcome(laws, GumbelVerifier(), "gumbel", spoil=prune), expected(laws)) < TOLERANCE


def test_a_bonus_from_the_wrong_row_is_not_exact() -> None:
    class Mutant(GumbelVerifier):
        def walk(self, tree: DraftTree, log_p: Tensor, positions: Tensor, noise: object) -> Verdict:
            verdict = super().walk(tree, log_p, positions, noise)  # type: ignore[arg-type]
            root = self.draw(log_p, positions, noise)[:, 0]  # type: ignore[arg-type]
            return Verdict(verdict.path, verdict.length, torch.where(verdict.length > 0, root, verdict.next_token))

    laws = toy()
    assert distance(outcome(laws, Mutant(), "gumbel"), expected(laws)) > 3 * TOLERANCE


def test_the_deepest_path_is_found() -> None:
    shape = TREE.shape()  # 1 2 3 below the root, 4 5 below 1, 6 below 2, 7 8 below 3
    matches = torch.tensor(
        [
            [1, 0, 0, 0, 1, 1, 1, 1, 1],  # nothing below the root matches: deeper matches are worth nothing
            [1, 0, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0, 0, 1],
            [1, 1, 0, 1, 0, 0, 0, 1, 0],
        ]
    ).bool()
    path = deepest_path(matches, shape)
    assert path.length.tolist() == [0, 1, 2, 2]
    assert path.last.tolist() == [0, 2, 8, 7]
    assert path.nodes.tolist() == [[0, 0], [2, 0], [3, 8], [3, 7]]
