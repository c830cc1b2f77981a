"""The cache and the tree mask, slot by slot; tests/proof/test_trees.py compares them with a target without cache."""

import torch

from lantern.decoding.cache import StaticCache, TreeMask
from lantern.drafters.trees.static import StaticTree


def test_writes_past_the_end_go_to_the_unread_last_slot() -> None:
    cache = StaticCache(
        layers=2, images=2, rows=1, heads=2, head_dim=16, prefix=6, codes=16, stage=4, dtype=torch.float32, device="cpu"
    )
    cache.buffer[..., cache.first_stage_slot :, :] = torch.arange(1, 5)[:, None].float()
    cache.commit(torch.tensor([[0, 1, 3], [2, 1, 0]]), torch.tensor([14, 5]))
    codes = cache.buffer[0, :, 0, 6 : 6 + 16, 0]
    assert codes[0, 14] == 1 and codes[0, :14].abs().sum() == 0
    assert codes[1, 5:8].tolist() == [3, 2, 1] and codes[1].count_nonzero() == 3


def test_tree_mask_matches_its_docstring() -> None:
    cache = StaticCache(
        layers=1, images=1, rows=1, heads=1, head_dim=4, prefix=1, codes=4, stage=4, dtype=torch.float32, device="cpu"
    )
    shape = StaticTree(((0,), (1,), (1, 0))).shape()
    mask = TreeMask(cache, torch.ones(1, 1, dtype=torch.bool), 4).update(torch.tensor([2]), shape.ancestors)
    assert mask[0].exp().long().tolist() == [
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 1],
    ]
