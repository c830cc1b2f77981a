"""Dynamic trees of random candidates are closed, ordered, and match a slow reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.drafters.trees.dynamic import Candidates, shape_of


def candidates(seed: int, images: int = 2, depth: int = 4, width: int = 3) -> Candidates:
    generator = torch.Generator().manual_seed(seed)
    found = Candidates.of_root(torch.zeros(images, 1, dtype=torch.long))
    first, above = 0, 1
    for level in range(1, depth + 1):
        count = width * above if level == 1 else width * width
        parents = first + torch.randint(above, (images, count), generator=generator)
        numbers = torch.arange(count).expand(images, -1)
        values = found.values.gather(1, parents) - torch.rand(images, count, generator=generator) - 1e-3
        more = Candidates(numbers, parents, numbers, torch.full_like(numbers, level), values)
        first, above, found = found.count, count, found.and_more(more)
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_best_nodes_include_their_parents(seed: int, nodes: int) -> None:
    found = candidates(seed)
    kept = found.best_nodes(nodes)
    assert kept.shape == (2, min(nodes, found.count - 1) + 1)
    for image in range(2):
        chosen = set(kept[image].tolist())
        assert {int(found.parents[image, i]) for i in chosen} <= chosen
        left = [float(found.values[image, i]) for i in range(1, found.count) if i not in chosen]
        assert not left or min(float(found.values[image, i]) for i in chosen) >= max(left)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_shape_matches_a_walk_up_from_each_node(seed: int, nodes: int) -> None:
    found = candidates(seed)
    kept = found.best_nodes(nodes)
    shape = shape_of(found, kept, (9,) * 4)
    assert (shape.parents[:, 1:] < torch.arange(1, kept.shape[1])).all()
    for image, numbers in enumerate(kept.tolist()):
        for node, number in enumerate(numbers):
            way, here = {node}, number
            while here != 0:
                here = int(found.parents[image, here])
                way.add(numbers.index(here))
            assert {i for i, sees in enumerate(shape.ancestors[image, node].tolist()) if sees} == way
            assert int(shape.depths[image, node]) == len(way) - 1
