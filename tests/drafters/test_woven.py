"""Woven trees: the first child of every node is the target's sample for the place, followed by drafts."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.drafters.combined.woven import WovenDrafter, followers, offspring, with_chain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import StaticTree, named
from lantern.methods import METHODS, specs
from lantern.methods.registry import add_ons_of, build_decoder
from lantern.models.llamagen.transformer import Transformer
from tests.drafters.sampled_trees import drafted, stepped
from tests.tiny import tiny_eagle, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, plain_codes, tiny_decoder

STRANDS = [spec.name for spec in specs() if spec.weavable]
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1)))


def woven(target: Transformer = TARGET, tree: StaticTree = TREE, inner: StaticTree | None = None, **how: Any) -> Any:
    strand = EagleDrafter(tiny_eagle(target), target, tree=inner or tree, mode="gumbel", sampling=SAMPLING)
    options: dict[str, Any] = {"window": 5} | how
    return WovenDrafter(strand, target, tree=tree, sampling=SAMPLING, **options)


def test_followers_match_the_drawing() -> None:
    tree = StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1, 0)))
    # by depth: 1 2 are children of the root, 3 of 1, 4 of 2, 5 and 6 extend 3
    assert followers(tree, 4)[:3] == [[1, 3, 5, 6], [3, 5, 6, -1], [4, 5, 6, -1]]


def test_offspring_are_children_in_rank_order() -> None:
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 2)))
    assert offspring(tree) == [[1, 2, -1], [3, 4, 5], [-1] * 3, [-1] * 3, [-1] * 3, [-1] * 3]


def test_chain_extends_the_tree() -> None:
    whole = with_chain(TREE, 5)
    assert whole.max_nodes == TREE.max_nodes + 3 and whole.depth == 5
    assert whole.choices[: len(TREE.choices)] == TREE.choices


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_codes_equal_plain_decoding(window: int, share: float) -> None:
    assert torch.equal(drafted(woven(window=window, share=share))[0], plain_codes())


def test_first_children_are_the_targets_samples_behind_the_nearest_code() -> None:
    _, drafts = drafted(drafter := woven(share=0.5))
    shape = drafter.whole.shape()
    checked = 0
    for (_, before, step), (_, tree, _) in pairwise(drafts):
        for image in range(3):
            if step.start[image] + step.counts[image] >= 16:
                continue
            length = int(step.verdict.length[image])
            end = int(step.verdict.path[image, length - 1]) if length else 0
            children = [i for i in range(1, shape.num_nodes) if shape.parents[i] == end]
            nodes = followers(drafter.whole, 5)[end]
            if children:
                vectors, codes = TARGET.tok_embeddings.weight.detach(), before.tokens[image]
                required = vectors[step.verdict.next_token[image]]
                apart = [float((vectors[codes[i]] - required).norm()) for i in children]
                nearest = children[apart.index(min(apart))]
                nodes = [nearest, *followers(drafter.whole, 5)[nearest][:-1]]
            for depth, node in enumerate(nodes):
                first = [i for i in range(1, shape.num_nodes) if shape.depths[i] == depth + 1 and shape.ranks[i] == 0]
                if node >= 0:
                    sampled = step.verdict.leftovers.tokens[image, node]
                    assert (tree.tokens[image, first] == sampled).all()
                    checked += len(first)
    assert checked > 30


def test_siblings_are_different_codes() -> None:
    _, drafts = drafted(drafter := woven(share=0.5))
    parents = drafter.whole.shape().parents
    for _, tree, _ in drafts:
        for parent in range(drafter.max_nodes):
            children = [i for i in range(1, drafter.max_nodes) if parents[i] == parent]
            for codes in tree.tokens[:, children]:
                assert len(codes.unique()) == len(children)


def test_last_samples_are_accepted_for_independent_codes() -> None:
    """With zero embeddings distributions depend on the place only, so the first sample for a place is right."""
    target = tiny_target()
    target.tok_embeddings.weight.data.zero_()
    drafts = [drafted(woven(target, named("chain_1"), window=window), target)[1] for window in (1, 12)]
    # one pass over EAGLE's drafts, then 13 codes per pass
    assert len(drafts[1]) <= 3 < len(drafts[0])


@pytest.mark.parametrize(("options", "message"), [({"share": 1.0}, "share is 1.0"), ({"window": 1}, "window is 1")])
def test_invalid_settings_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        woven(**options)


@pytest.mark.parametrize("tree", [named("chain_2"), StaticTree(((0,), (1,), (1, 0)))])
def test_trees_of_another_drafter_raise(tree: StaticTree) -> None:
    with pytest.raises(ValueError, match="the drafter has another tree"):
        woven(tree=tree, inner=TREE)


# other drafters


@pytest.mark.parametrize("temperature", [1, 0])
@pytest.mark.parametrize("name", STRANDS)
def test_any_drafter_of_static_trees_can_be_woven(name: str, temperature: float) -> None:
    sampling = Sampling(guidance=3, temperature=temperature)
    parts = tiny_decoder("woven", sampling=sampling, drafter=name, tree=TREE.spelling, window=5)
    assert isinstance(parts.drafter, WovenDrafter)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, plain_codes(sampling=sampling))


@pytest.mark.parametrize("name", STRANDS)
def test_first_tree_equals_that_of_the_woven_method(name: str) -> None:
    """Below the root of the first tree no sample is known: the children are those of the woven method."""
    decoders = tiny_decoder("woven", drafter=name, tree="grown_8_2"), tiny_decoder(name, tree="grown_8_2")
    assert torch.equal(*(stepped(decoder)[1][0].tree.tokens[:, :9] for decoder in decoders))


@pytest.mark.parametrize("name", STRANDS)
def test_recorded_log_q_ranks_the_later_children(name: str) -> None:
    """The best codes of row i of log q plus the target's noise are the later children of node i."""
    parts = tiny_decoder("bounded-woven", drafter=name, tree=TREE.spelling, window=5, k=8)
    _, steps = stepped(parts)
    drafter, checked = parts.drafter, 0
    assert isinstance(drafter, WovenDrafter)
    shape = drafter.whole.shape()
    for step in steps:
        for node in [i for i in range(shape.num_nodes) if int((shape.parents[1:] == i).sum()) > 1]:
            places = (step.start + shape.depths[node]).clamp(max=15)[:, None]
            scores = step.tree.log_q[:, node] + drafter.noise.gumbel(places)[:, 0]
            children = [i for i in range(1, shape.num_nodes) if shape.parents[i] == node]
            later = step.tree.tokens[:, children[1:]]
            first = step.tree.tokens[:, children[:1]]
            best = scores.scatter(1, first, -torch.inf).topk(later.shape[1], dim=1).indices
            assert torch.equal(best, later)
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagel3", 'method "eagel3" is unknown: did you mean "eagle3"'),
        ("sjd", 'drafter "sjd" has no tree that can be woven: name a method that drafts a static tree'),
        ("woven", 'drafter "woven" has no tree that can be woven'),
        ("eagle3", 'method "woven" needs the trained part "eagle3", which this model lacks'),
        ("eagle1", 'method "woven" needs a drafter and this model has none'),
    ],
)
def test_unknown_drafters_raise(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as reported:
        build_decoder(METHODS["woven"].with_options(drafter=name), TARGET, sampling=SAMPLING)
    assert "\n" not in str(reported.value)


def test_parts_are_those_of_the_woven_method() -> None:
    assert add_ons_of(METHODS["woven"]) == () and add_ons_of(METHODS["woven"].with_options(drafter="poss")) == ("poss",)
    assert add_ons_of(METHODS["bounded-woven"].with_options(drafter="self-cascade")) == ("small",)
    assert add_ons_of(METHODS["medusa"]) == ("medusa",)
