"""SAM: matches equal brute force, and images equal plain decoding for any match."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.drafters.lookup import ContextTable, GridMatcher, Past, SamTables, SuffixMatcher, around, super_tokens
from tests.drafters.sampled_trees import drafted
from tests.refusals import refused
from tests.tiny_decoder import CONDITION, KEYS, TARGET, plain_tokens, tiny_decoder
from tests.tiny_parts import tiny_tokens


def random_tokens(images: int, count: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(0, tokens, (images, count), generator=torch.Generator().manual_seed(seed))


def tables_of(tokens: int, groups: int, corpus: Tensor) -> SamTables:
    codebook = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(1))
    return SamTables.of_tokens(corpus, codebook, groups=groups)


def test_super_tokens_are_clusters_of_near_tokens() -> None:
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = torch.cat(
        [c + 0.1 * torch.randn(8, 2, generator=torch.Generator().manual_seed(i)) for i, c in enumerate(centres)]
    )
    found = super_tokens(points, 3, seed=4).view(3, 8)
    assert (found == found[:, :1]).all() and len(set(found[:, 0].tolist())) == 3
    assert super_tokens(points, 24).unique().numel() == 24


@pytest.mark.parametrize("is_super", [False, True])
def test_suffixes_match_brute_force(is_super: bool) -> None:
    """In the image's own past and, of super-tokens, in the images of the corpus."""
    corpus, tokens, known = random_tokens(2, 16, 5, seed=0), random_tokens(3, 16, 5, seed=7), [1, 9, 16]
    matcher = SuffixMatcher(tables_of(5, 2, corpus), is_super=is_super, sharp=0.5, least=2, reach=6)
    context, symbols = matcher.root(Past(tokens, torch.tensor(known))), matcher.symbol_of
    drafted = torch.tensor([[0, 3], [1, 2], [4, 4]])
    deeper = matcher.extend(context, torch.tensor([0, 0]), drafted)
    for image, count in enumerate(known):
        texts = [tokens[image, :count], *(corpus if is_super else ())]
        for found, node in ((context, None), (deeper, 0), (deeper, 1)):
            ending = symbols[tokens[image, :count]].tolist()
            ending += [] if node is None else [int(symbols[drafted[image, node]])]
            (followers, weights), *others = matcher.evidence(found)
            expected = torch.zeros(len(texts), 16)
            for number, text in enumerate(texts):
                output = symbols[text].tolist()
                for place in range(len(output)):
                    length, most = 0, min(6, place, len(ending))
                    while length < most and output[place - 1 - length] == ending[-1 - length]:
                        length += 1
                    expected[number, place] = math.exp(0.5 * length) if length >= 2 else 0.0
            torch.testing.assert_close(weights[image, node or 0], expected[0])
            assert torch.equal(followers[image, node or 0, :count], texts[0]) and len(others) == is_super
            for token, weight in others:  # behind the longest suffix of the corpus
                longest = expected[1:].max()
                torch.testing.assert_close(weight[image, node or 0], longest[None])
                assert not longest or int(token[image, node or 0]) in corpus[expected[1:] == longest]


def test_grid_contexts_match_brute_force() -> None:
    tables = tables_of(5, 2, random_tokens(0, 16, 5, seed=0))
    matcher = GridMatcher(tables, sharp=1.0, least=1)
    tokens, known = random_tokens(2, 16, 5, seed=8), [7, 12]
    root = matcher.root(Past(tokens, torch.tensor(known)))
    context = matcher.extend(root, torch.tensor([0, 0]), torch.tensor([[1, 2], [3, 0]]))
    ((_, found),), near = matcher.evidence(context), around(4).tolist()
    assert near[5] == [4, 1, 0, 2] and near[0] == [-1] * 4 and near[7] == [6, 3, 2, -1]  # left, upper, both corners
    groups = [*tables.group_of.tolist(), 2]
    for image, count in enumerate(known):
        output = [*tokens[image, :count].tolist(), *[5] * (16 - count)]

        def fields(place: int, left: int | None = None, output: list[int] = output) -> list[int]:
            tokens = [output[n] if n >= 0 else 5 for n in near[place]]
            tokens[0] = left if left is not None and near[place][0] >= 0 else tokens[0]
            return [groups[token] for token in tokens] + tokens[:2]

        for node in range(2):
            key = fields(count + 1, int(context.left[image, node]))
            for place in range(16):
                agree = sum(a == b for a, b in zip(key, fields(place), strict=True))
                weight = torch.tensor(float(agree)).exp() if place < count and agree else torch.tensor(0.0)
                torch.testing.assert_close(found[image, node, place], weight)


def test_context_table_keeps_the_most_frequent_tokens() -> None:
    corpus = torch.zeros(1, 16, dtype=torch.long)
    corpus[0, 5:8] = torch.tensor([1, 1, 2])
    tables = tables_of(3, 3, corpus)
    table = ContextTable(tables, (0, 1))
    groups = tables.group_of.long()
    key = torch.cat([groups[torch.tensor([0, 0, 0, 0])], torch.tensor([0, 0])])[None, None]
    tokens, weights = table.look_up(key, sharp=0.0)
    expected = [int(corpus[0, p]) for p in range(16) if p % 4 and p >= 4 and corpus[0, p - 1] == 0 == corpus[0, p - 4]]
    counts = {token: expected.count(token) for token in set(expected)}
    found = {int(c): float(w) for c, w in zip(tokens[0, 0], weights[0, 0], strict=True) if w > 0}
    assert found == {token: float(count) for token, count in counts.items()}


@pytest.mark.parametrize(("name", "match", "pictures"), [("sam", "super", 2), ("sam-eagle1", "tokens", 0)])
def test_pictures_equal_plain_decoding_for_other_matchers(name: str, match: str, pictures: int) -> None:
    sampling = Sampling(guidance=3, temperature=0.8)
    tables = tables_of(24, 6, tiny_tokens(TARGET, 2)[:pictures])
    parts = tiny_decoder(name, sampling=sampling, add_ons={"sam": tables}, match=match, least=1)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, plain_tokens(sampling=sampling))


def test_a_joined_tree_has_the_paths_of_both() -> None:
    drafter, seen = tiny_decoder("sam-eagle1", tree="narrow_10", copies="0 1 0.0 0.0.0 1.0").drafter, []
    for part in (drafter.eagle, drafter.sam):  # type: ignore[union-attr]
        part.propose = lambda propose=part.propose: seen.append(propose()) or seen[-1]
    for (known, tree, _), *parts in zip(drafted(drafter)[1], seen[::2], seen[1::2], strict=True):
        assert known[0] > 15 or paths(tree) == paths(parts[0]) | paths(parts[1])
        assert tree.shape.num_nodes == 1 + 10 + 5


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens from the root to each node in the first image."""
    return {tuple(tree.tokens[0, node].tolist()) for node in tree.shape.ancestors}


def test_weights_beyond_fp32_are_refused_and_long_reaches_are_those_of_the_image() -> None:
    for match, most, longest in (("grid", 13.3, 6), ("tokens", 5.0, 16)):
        tiny_decoder("sam", match=match, sharp=most, reach=10**9)
        call = partial(tiny_decoder, "sam", match=match, sharp=most + 0.1, reach=10**9)
        refused(call, match=rf"sharp is {most + 0.1:g}, wanted at most {most:g}.*: matches of up to {longest} have the")
