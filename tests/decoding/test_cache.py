"""The cache and the tree mask: scoring and committing a tree is feeding its path code by code."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.decoding.cache import StaticCache
from lantern.decoding.tree_mask import TreeMask
from lantern.types import TreeShape
from tests.tiny import tiny_target

TARGET = tiny_target()
PREFIX, CODES = 6, 16


def shape_of(parents: list[int]) -> TreeShape:
    nodes = len(parents)
    ancestors, depths = torch.eye(nodes, dtype=torch.bool), [0] * nodes
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
        depths[node] = depths[parents[node]] + 1
    ranks = [sum(parents[i] == parents[node] for i in range(1, node)) for node in range(nodes)]
    widths = (nodes,) * max(depths)
    return TreeShape(torch.tensor(parents), torch.tensor(ranks), torch.tensor(depths), ancestors, widths)


trees = st.integers(1, 9).flatmap(lambda n: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(n)])).map(list)


def prompted(images: int, stage: int) -> tuple[StaticCache, torch.Tensor]:
    cache = StaticCache(
        layers=2,
        images=images,
        rows=1,
        heads=2,
        head_dim=16,
        prefix=PREFIX,
        codes=CODES,
        stage=stage,
        dtype=torch.float32,
        device="cpu",
    )
    prompts = torch.randn(images, PREFIX, 32, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(PREFIX) >= torch.tensor([2, 0, 4, 1])[:images, None]
    seen = torch.zeros(images, PREFIX, cache.slots, dtype=torch.bool)
    seen[:, :, :PREFIX] = (mask[:, None] | torch.eye(PREFIX, dtype=torch.bool)).tril()
    slots = torch.arange(PREFIX).expand(images, -1)
    TARGET.features(prompts, slots, seen, cache=cache, slots=slots)
    return cache, mask


def score(cache: StaticCache, mask: torch.Tensor, tokens: torch.Tensor, shape: TreeShape, known: torch.Tensor):
    tree_mask = TreeMask(cache, mask, shape.num_nodes).update(known - 1, shape.ancestors)
    places = (known[:, None] - 1 + shape.depths).clamp(max=CODES - 1)
    slots = (torch.arange(shape.num_nodes) + cache.first_stage_slot).expand(len(tokens), -1)
    return TARGET(TARGET.tok_embeddings(tokens), places + PREFIX, tree_mask, cache=cache, slots=slots).logits


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == 0 else [*path_to(parents[node], parents), node]


@torch.no_grad()
@settings(max_examples=25, deadline=None)
@given(parents=trees, seed=st.integers(0, 99))
def test_a_tree_scores_each_path_as_if_it_were_alone(parents: list[int], seed: int) -> None:
    shape = shape_of(parents)
    tokens = torch.randint(24, (2, len(parents)), generator=torch.Generator().manual_seed(seed))
    cache, mask = prompted(2, len(parents))
    whole = score(cache, mask, tokens, shape, torch.tensor([1, 1]))
    for node in range(len(parents)):
        path = [0, *path_to(node, parents)]
        chain = shape_of([max(i - 1, 0) for i in range(len(path))])
        alone_cache, _ = prompted(2, len(path))
        alone = score(alone_cache, mask, tokens[:, path], chain, torch.tensor([1, 1]))
        assert (alone[:, -1] - whole[:, node]).abs().max() <= 1e-5


@torch.no_grad()
@settings(max_examples=25, deadline=None)
@given(parents=trees, seed=st.integers(0, 99), images=st.sampled_from([1, 3]))
def test_committing_a_path_is_feeding_it_code_by_code(parents: list[int], seed: int, images: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = shape_of(parents)
    tokens = torch.randint(24, (images, len(parents)), generator=generator)
    after = torch.randint(24, (images, 1), generator=generator)
    ends = torch.randint(len(parents), (images,), generator=generator).tolist()
    paths = [[0, *path_to(end, parents)] for end in ends]
    cache, mask = prompted(images, len(parents))
    score(cache, mask, tokens, shape, torch.ones(images, dtype=torch.long))
    nodes = torch.tensor([path + [0] * (len(parents) - len(path)) for path in paths])
    cache.commit(nodes, torch.zeros(images, dtype=torch.long))
    root = shape_of([0])
    known = torch.tensor([len(path) for path in paths])
    committed = score(cache, mask, after, root, known + 1)
    for image, path in enumerate(paths):
        fed, _ = prompted(images, 1)
        for j, node in enumerate(path):
            length = torch.full((images,), j)
            score(fed, mask, tokens[:, node : node + 1], root, length + 1)
            fed.commit(torch.zeros(images, 1, dtype=torch.long), length)
        expected = score(fed, mask, after, root, torch.full((images,), len(path) + 1))
        assert (expected[image] - committed[image]).abs().max() <= 1e-5


@torch.no_grad()
def test_writes_past_the_end_land_in_the_slot_that_nobody_reads() -> None:
    cache, _ = prompted(2, 4)
    cache.buffer.zero_()
    cache.buffer[..., cache.first_stage_slot :, :] = torch.arange(1, 5)[:, None].float()
    cache.commit(torch.tensor([[0, 1, 3], [2, 1, 0]]), torch.tensor([14, 5]))
    codes = cache.buffer[0, :, 0, PREFIX : PREFIX + CODES, 0]
    assert codes[0, 14] == 1 and codes[0, :14].abs().sum() == 0
    assert codes[1, 5:8].tolist() == [3, 2, 1] and codes[1].count_nonzero() == 3


def test_the_mask_is_the_one_drawn_in_its_docstring() -> None:
    cache = StaticCache(
        layers=1, images=1, rows=1, heads=1, head_dim=4, prefix=1, codes=4, stage=4, dtype=torch.float32, device="cpu"
    )
    shape = shape_of([0, 0, 0, 2])
    mask = TreeMask(cache, torch.ones(1, 1, dtype=torch.bool), 4).update(torch.tensor([2]), shape.ancestors)
    assert mask[0].exp().long().tolist() == [
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 1],
    ]
