"""The path that Gumbel match keeps; tests/proof compares its tokens with plain decoding's."""

import torch

from lantern.drafters.trees.static import named
from lantern.verifiers.gumbel import deepest_path


def test_the_deepest_path_is_found() -> None:
    shape = named("0 1 2 0.0 0.1 1.0 2.0 2.1").shape()  # 1 2 3 below the root, 4 5 below 1, 6 below 2, 7 8 below 3
    matches = torch.tensor(
        [
            [1, 0, 0, 0, 1, 1, 1, 1, 1],  # nothing below the root matches: deeper matches do not count
            [1, 0, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0, 0, 1],
            [1, 1, 0, 1, 0, 0, 0, 1, 0],
        ]
    ).bool()
    path = deepest_path(matches, shape)
    assert path.length.tolist() == [0, 1, 2, 2]
    assert path.last.tolist() == [0, 2, 8, 7]
    assert path.nodes.tolist() == [[0, 0], [2, 0], [3, 8], [3, 7]]
