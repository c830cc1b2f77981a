"""Traversal verification samples from the target's distribution: all its randomness enumerated, and whole images drawn.

A walk tests nodes in a fixed order, each by a uniform of its own against a rate that earlier refusals determine. The
rates are found by trying uniforms, as in `enumeration.py`.
"""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftMode, DraftTree
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees import StaticTree, chain
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.traversal import TraversalVerifier, leaf_order
from tests.proof import draws, enumeration
from tests.proof.enumeration import BASE, SLACK, Forced, Walked, assignments, node_strings, repeated, thresholds
from tests.proof.pictures import DISTRIBUTION, PICTURES, SMALL, p_value, pictures
from tests.proof.worlds import KINDS, TREES, GivenRows, World, world
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

CLEAN = 1e-9
BRANCHED = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))


def walk_from_each(
    world: World, verifier: TraversalVerifier, draft: DraftTree, tried: Float64[Tensor, "a n"]
) -> Walked:
    """Walk each tree once for each node, with the uniform tried for it; all others are refused."""
    trees, nodes = tried.shape
    uniforms = torch.ones(nodes, trees, nodes, dtype=torch.float64)
    uniforms.diagonal(dim1=0, dim2=2).copy_(tried)
    walked = enumeration.walk(world, verifier, repeated(draft, nodes), uniforms.flatten(0, 1)[:, None])
    return Walked(walked.end.view(nodes, trees).T, walked.distribution.view(nodes, trees, -1).transpose(0, 1))


def distance(world: World, verifier: TraversalVerifier, mode: DraftMode, tree: StaticTree) -> float:
    """Return the total variation between what a step commits, completed by p, and p."""
    draft, refused = assignments(world, mode, tree)
    many, nodes = repeated(draft, BASE - 1), torch.arange(tree.max_nodes)
    rates = thresholds(lambda tried: walk_from_each(world, verifier, many, tried).end == nodes, draft.tokens.shape)
    rates[:, 0] = 1.0  # the walk ends at the root when all others are refused
    walked = walk_from_each(world, verifier, draft, torch.zeros_like(rates))
    ends = torch.zeros_like(rates)
    for node in [*leaf_order(draft.shape).order, 0]:
        ends[:, node] = refused * rates[:, node]
        refused = refused - ends[:, node]
    came = walked.end == nodes
    assert float(ends[~came].sum()) < SLACK, "an end of the walk that has a chance does not come about"
    made = enumeration.completed(world, draft, ends, walked.distribution)
    return float((made - world.distribution()).abs().sum() / 2)


@pytest.mark.parametrize("mode", ["point", "sampled"])
@pytest.mark.parametrize("tree", [*TREES.values(), BRANCHED], ids=[*TREES, "branched"])
@pytest.mark.parametrize("kind", KINDS)
def test_traversal_matches_target_distribution(kind: str, tree: StaticTree, mode: DraftMode) -> None:
    toy = world(kind, 3, count=2 if tree.max_nodes > 4 else 3, tokens=4 if kind == "disjoint" else 3)
    if max(tree.shape().widths) <= toy.tokens:
        assert distance(toy, TraversalVerifier(), mode, tree) < CLEAN


class Drawn(Forced):
    """Given uniforms, one per node, as traversal or as rejection asks for them; next tokens are of no interest."""

    def uniform(self, positions: Int[Tensor, "b n"], lanes: int, **others: Any) -> Tensor:
        return self.uniforms[:, None] if positions.shape[1] == 1 else self.uniforms[:, :, None]

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = 1) -> Tensor:
        return torch.zeros(*positions.shape, 1)


def test_traversal_commits_more_of_a_chain_than_rejection() -> None:
    toy = world("generic", 7, tokens=4, count=3)
    draft, weights = assignments(toy, "sampled", chain(3))
    many, generator = repeated(draft, 200), torch.Generator().manual_seed(0)
    log_p, places = toy.log_p(node_strings(toy, many.tokens, many.shape)), many.shape.depths.expand(many.tokens.shape)
    lengths = []
    for verifier in (TraversalVerifier(), RejectionVerifier()):
        noise = Drawn(torch.rand(len(many.tokens), 4, dtype=torch.float64, generator=generator))
        verdict = verifier.verify(many, GivenRows(log_p, places, noise), noise)
        lengths.append(float((verdict.length * weights.repeat(200)).sum() / 200))
    assert lengths[0] > lengths[1] * 1.02


def test_whole_images_need_fresh_noise() -> None:
    """Noise that nodes of one token number or later steps share, as it suits rejection, is detected."""
    toy = world("generic", 7, tokens=3, count=4)
    for is_fresh in (True, False):
        found = draws.draw(toy, TraversalVerifier(), "sampled", BRANCHED, is_fresh=is_fresh).p_value(toy.distribution())
        assert found > 1e-4 if is_fresh else found < 1e-9


def test_pictures_by_the_drafter_need_fresh_noise() -> None:
    decoder = tiny_decoder("eagle1-traversal", SMALL, DISTRIBUTION, tree="0 1 0.0 0.1 1.0")
    assert isinstance(decoder.drafter, EagleDrafter) and decoder.drafter.is_fresh
    assert p_value(pictures(decoder, PICTURES).tokens) > 1e-4
    decoder.drafter.is_fresh = False
    assert p_value(torch.cat([pictures(decoder, PICTURES, seed).tokens for seed in range(3)])) < 1e-9


def test_fresh_noise_differs_between_nodes_and_steps_and_depends_on_the_key_alone() -> None:
    noise = Noise([(1, 0), (2, 5)], positions=8, vocab_size=16)
    rows = torch.arange(3)
    first, second = noise.fresh(torch.tensor([0, 3]), rows), noise.fresh(torch.tensor([1, 4]), rows)
    several = torch.cat([first.flatten(0, 1), second.flatten(0, 1), noise.gumbel(torch.zeros(2, 1).long(), 2)[:, 0]])
    assert len(several.unique(dim=0)) == len(several)
    assert torch.equal(Noise([(2, 5)], positions=8, vocab_size=16).fresh(torch.tensor([3]), rows)[0], first[1])
    assert float(several.mean()) == pytest.approx(0.5772, abs=0.25)


def test_a_verdict_leaves_no_rows_to_the_collector() -> None:
    """On a GPU they are large, and Python's collector does not know that."""
    parts = tiny_decoder("eagle1-traversal", tiny_target())
    found, verify = list[ref[Any]](), parts.verifier.verify

    def watched(tree: Any, rows: Any, noise: Any) -> Any:
        found.append(ref(rows))
        return verify(tree, rows, noise)

    gc.collect()
    gc.disable()
    try:
        object.__setattr__(parts.verifier, "verify", watched)
        parts.generate(CONDITION, keys=KEYS)
        assert len(found) > 2 and not any(one() for one in found[:-1])
    finally:
        gc.enable()
