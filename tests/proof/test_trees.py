"""On random trees, scoring a tree equals scoring each path alone, and committing a path equals feeding it.

The oracle is one causal pass over prompt and tokens without cache, tree or collapsed prompt.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree, TreeShape
from lantern.decoding.loop import State, begin
from lantern.verifiers.gumbel import GumbelVerifier
from tests.tiny import uncached
from tests.tiny_decoder import CONDITION, TARGET, GivenTrees

COUNT, SLOTS, TOKENS = 16, 6, 24
CLOSE = 1e-5

parents_of_nodes = st.integers(1, 9).flatmap(lambda n: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(n)]))


def shape_of(trees: list[tuple[int, ...]]) -> TreeShape:
    parents, nodes = torch.tensor(trees), len(trees[0])
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(len(trees), 1, 1)
    depths, ranks = torch.zeros_like(parents), torch.zeros_like(parents)
    for tree, above in enumerate(trees):
        for node in range(1, nodes):
            ancestors[tree, node] |= ancestors[tree, above[node]]
            depths[tree, node] = depths[tree, above[node]] + 1
            ranks[tree, node] = sum(above[i] == above[node] for i in range(1, node))
    widths = (nodes,) * int(depths.max())
    fields = [parents, ranks, depths, ancestors]
    return TreeShape(*(field[0] if len(trees) == 1 else field for field in fields), widths)  # type: ignore[misc]


def state_with(tokens: Int[Tensor, "b n"], known: Int[Tensor, " b"], sampling: Sampling) -> State:
    """Return a generation in which `known` tokens of each image are decided. All tokens were fed as one path."""
    images = len(tokens)
    state = State(TARGET, sampling, GivenTrees(COUNT), GumbelVerifier())
    begin(state, CONDITION.select(range(images)), keys=[(0, i) for i in range(images)])
    score(state, DraftTree(tokens, TreeShape.chain(COUNT - 1, tokens.device), "point"))
    state.cache.commit(torch.arange(COUNT).expand(images, -1), torch.zeros(images, dtype=torch.long))
    state.known.copy_(known)
    return state


def score(state: State, tree: DraftTree) -> Float[Tensor, "b r n v"]:
    assert isinstance(state.drafter, GivenTrees)
    state.drafter.tree = tree
    return state.draft().scores(TARGET).logits.unflatten(0, (len(tree.tokens), -1))


def oracle(image: int, tokens: Int[Tensor, " n"], sampling: Sampling) -> Float[Tensor, "r n v"]:
    """Return the logits after each token of an image, for both guidance rows."""
    return uncached(TARGET, CONDITION.select([image]), tokens[None], rows=sampling.rows)[0, :, SLOTS:]


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    return [] if node == 0 else [*path_to(parents[node], parents), node]


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], Tensor, Tensor, Sampling]:
    """Return trees (one for all images or one for each), whole images, the number of known tokens and the sampling."""
    images, first = draw(st.integers(1, 3)), draw(parents_of_nodes)
    trees = [first]
    if draw(st.booleans()):
        nodes = [st.integers(0, max(i - 1, 0)) for i in range(len(first))]
        trees += [draw(st.tuples(*nodes)) for _ in range(images - 1)]
    known = torch.tensor(draw(st.lists(st.integers(1, COUNT), min_size=images, max_size=images)))
    tokens = torch.randint(
        TOKENS, (images, COUNT), generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    )
    return trees, tokens, known, Sampling(guidance=draw(st.sampled_from([1.0, 3.0])))


Draft = tuple[list[tuple[int, ...]], Tensor, Tensor, Sampling]


def scored(draft: Draft) -> tuple[State, DraftTree, Float[Tensor, "b r n v"]]:
    """Return a generation with a tree below the last token of each image, the tree, and the logits of its nodes."""
    trees, tokens, known, sampling = draft
    state = state_with(tokens, known, sampling)
    nodes = torch.randint(
        TOKENS, (len(tokens), len(trees[0])), generator=torch.Generator().manual_seed(int(tokens.sum()))
    )
    nodes[:, 0] = tokens.gather(1, known[:, None] - 1)[:, 0]
    tree = DraftTree(nodes, shape_of(trees), "point")
    return state, tree, score(state, tree)


@torch.no_grad()
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drafts())
def test_scores_of_a_tree_equal_scores_of_its_paths(draft: Draft) -> None:
    trees, tokens, known, sampling = draft
    _, tree, logits = scored(draft)
    compared = 0
    for image, length in enumerate(known.tolist()):
        parents = trees[min(image, len(trees) - 1)]
        for node in range(len(parents)):
            path = path_to(node, parents)
            if length + len(path) <= COUNT:  # nodes past the end have no meaning
                alone = oracle(image, torch.cat([tokens[image, :length], tree.tokens[image, path]]), sampling)
                assert (alone[:, -1] - logits[image, :, node]).abs().max() <= CLOSE
                compared += 1
    assert compared >= len(known)  # the root at least


@torch.no_grad()
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drafts(), st.integers(0, 10**6))
def test_committing_a_path_equals_feeding_it(draft: Draft, seed: int) -> None:
    trees, tokens, known, sampling = draft
    state, tree, _ = scored(draft)
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(len(trees[0]), (len(known),), generator=generator).tolist()
    paths = [path_to(end, trees[min(i, len(trees) - 1)]) for i, end in enumerate(ends)]
    depth = max(len(path) for path in paths)
    state.cache.commit(torch.tensor([[0, *path, *[0] * (depth - len(path))] for path in paths]), known - 1)
    state.known.copy_((known + torch.tensor([len(path) + 1 for path in paths])).clamp(max=COUNT))
    after = torch.randint(TOKENS, (len(known), 1), generator=generator)
    logits = score(state, DraftTree(after, TreeShape.chain(0, after.device), "point"))
    for image, (length, path) in enumerate(zip(known.tolist(), paths, strict=True)):
        if length + len(path) < COUNT:
            fed = torch.cat([tokens[image, :length], tree.tokens[image, path], after[image]])
            assert (oracle(image, fed, sampling)[:, -1] - logits[image, :, 0]).abs().max() <= CLOSE
