"""The cache and the tree mask, slot by slot; tests/proof/test_trees.py compares them with a target without cache."""

import torch

from lantern.drafters.trees.static import StaticTree
from tests.tiny import tiny_cache


def test_writes_past_the_end_go_to_the_unread_last_slot() -> None:
    cache = tiny_cache(layers=2, images=2, heads=2, head_dim=16, prefix=6, tokens=16, stage=4)
    cache.buffer[..., cache.first_stage_slot :, :] = torch.arange(1, 5)[:, None].float()
    cache.commit(torch.tensor([[0, 1, 3], [2, 1, 0]]), torch.tensor([14, 5]))
    tokens = cache.buffer[0, :, 0, 6 : 6 + 16, 0]
    assert tokens[0, 14] == 1 and tokens[0, :14].abs().sum() == 0
    assert tokens[1, 5:8].tolist() == [3, 2, 1] and tokens[1].count_nonzero() == 3


def test_tree_mask_matches_its_docstring() -> None:
    cache = tiny_cache(stage=4)
    shape = StaticTree(((0,), (1,), (1, 0))).shape()
    mask = cache.tree_mask(torch.ones(1, 1, dtype=torch.bool), 4).update(torch.tensor([2]), shape.ancestors)
    assert mask[0].exp().long().tolist() == [
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 1],
    ]
