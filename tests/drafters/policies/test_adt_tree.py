from itertools import pairwise

import pytest
import torch

from lantern.drafters.policies.adt_tree import AdtTree
from tests.drafters.policies.layers import layer


def shape(near: float) -> tuple[int, int]:
    """Return the depth of a tree and the children of a node at this acceptance of all neighbours."""
    policy, width = AdtTree(end=0.1, nodes=12), 12
    depth = 0
    children = 0
    for d in range(12):
        given = layer(d, near=torch.full((2, 3), near), width=width, match=torch.zeros(2, 3, width))
        live = (policy.chances(given, ())[0] > -torch.inf)[0, 0]
        if live.any():
            depth, children = d + 1, int(live.sum())
    return depth, children


def test_trees_are_deep_where_drafts_were_accepted_and_wide_elsewhere() -> None:
    assert shape(0.1) == (1, 12)
    assert shape(0.32) == (2, 6)
    assert shape(0.56) == (4, 3)
    assert shape(0.8) == (10, 2)


def test_depth_never_falls_and_width_never_rises_with_acceptance() -> None:
    shapes = [shape(a / 20) for a in range(21)]
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(shapes))


def test_end_outside_0_to_1_raises() -> None:
    with pytest.raises(ValueError, match="end is 0"):
        AdtTree(end=0.0)
