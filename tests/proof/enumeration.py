"""The distribution of what multi-round rejection commits in one step, with all randomness enumerated, in fp64.

There are three sources of randomness. Each is integrated exactly:

1. The draft. All assignments of tokens to nodes are listed with their probabilities under the draft mode.
2. The uniforms. The verifier accepts a child if its uniform is below a threshold that depends on earlier refusals. One
   number per child describes this: the probability of acceptance after its ancestors were accepted and its elder
   siblings refused. It is found by trying uniforms, with 0 for nodes to accept and 1 for nodes to refuse. This
   description is checked: every possible end of a walk must be reached when its uniforms are forced, and walks with
   random uniforms must end where these numbers predict.
3. The last token. The distribution passed to `draw` is recorded where the verifier calls it.

Tokens that the step leaves open are sampled from p, so the outcome has the target's distribution if the step is exact.
By induction over steps the same holds for whole images, since every string of a world is a world.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from lantern.core.sampling import Noise, Purpose
from lantern.core.types import DraftMode, DraftTree, TreeShape
from lantern.drafters.trees import StaticTree
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.traversal import TraversalVerifier
from tests.proof.worlds import GivenRows, World

DIGITS, BASE = 18, 4  # of probabilities of acceptance
SLACK = 1e-9
Spoil = Callable[[DraftTree], DraftTree]


@dataclass(frozen=True)
class Walked:
    """The node at which each walk ended, and the distribution of its next token."""

    end: Int[Tensor, "*a"]
    distribution: Float64[Tensor, "*a v"]


class Forced(Noise):
    """Given uniforms and no Gumbel noise."""

    def __init__(self, uniforms: Float64[Tensor, "b n w"]) -> None:
        self.uniforms = uniforms

    def uniform(self, positions: Tensor, lanes: int, *, purpose: int = 3, iterations: Tensor | None = None) -> Tensor:
        """Row i, lane r is for the child of rank r of node i."""
        assert positions.shape == self.uniforms.shape[:2] and lanes <= self.uniforms.shape[2]
        assert purpose == Purpose.TEST and iterations is None
        return self.uniforms[..., :lanes]

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = 1) -> Tensor:
        """Fail: nothing may use Gumbel noise."""
        raise AssertionError("the distribution of the last token is recorded, so nothing needs Gumbel noise")


def distance(
    world: World,
    verifier: RejectionVerifier,
    mode: DraftMode,
    tree: StaticTree,
    *,
    spoil: Spoil | None = None,
    believed: DraftMode | None = None,
) -> float:
    """Return the total variation between the distribution of what a step commits, completed by p, and p.

    `spoil` changes each tree after sampling; `believed` is the mode that the verifier receives.
    """
    draft, weights = assignments(world, mode, tree)
    draft = replace(draft, mode=believed or mode)
    made = outcome(world, verifier, spoil(draft) if spoil else draft, weights)
    return float((made - world.distribution()).abs().sum() / 2)


def assignments(world: World, mode: DraftMode, tree: StaticTree) -> tuple[DraftTree, Float64[Tensor, " a"]]:
    """Return all ways in which a tree may be drafted, and the chance of each.

    They are listed node by node. The children of a node are sampled together, in order.
    """
    shape = tree.shape()
    tokens = torch.zeros(1, shape.num_nodes, dtype=torch.long)
    weights = torch.ones(1, dtype=torch.float64)
    for node in range(shape.num_nodes):
        children = [i for i in range(1, shape.num_nodes) if int(shape.parents[i]) == node]
        if not children:
            continue
        q = world.look_up(world.q, node_strings(world, tokens, shape)[:, node])
        tuples = torch.tensor(list(product(range(world.tokens), repeat=len(children))))
        chances = chance(q, tuples, mode) * weights[:, None]
        which, sampled = (chances > 0).nonzero(as_tuple=True)
        weights = chances[which, sampled]
        tokens = tokens[which].index_copy(1, torch.tensor(children), tuples[sampled])
    return DraftTree(tokens, shape, mode, world.log_q(node_strings(world, tokens, shape))), weights


def chance(q: Float64[Tensor, "a v"], tuples: Int[Tensor, "t k"], mode: DraftMode) -> Float64[Tensor, "a t"]:
    """The chance of each tuple of siblings. "point" takes the best tokens of q, and of three siblings the last again.

    Where draws without replacement run out of tokens that q can draw, the lowest that are left follow.
    """
    if mode == "point":
        best = q.sort(dim=-1, descending=True, stable=True).indices[:, : tuples.shape[1]]
        best[:, 2:] = best[:, :1]
        return (best[:, None] == tuples).all(-1).double()
    distribution = q[:, None].expand(-1, len(tuples), -1)
    undrawn = torch.ones_like(distribution, dtype=torch.bool)
    total = torch.ones(distribution.shape[:2], dtype=torch.float64)
    for rank in range(tuples.shape[1]):
        token = tuples[:, rank].expand(len(q), -1)[..., None]
        if mode == "sampled":
            distribution = torch.where(undrawn, distribution, 0.0)
            lowest = torch.nn.functional.one_hot(undrawn.long().argmax(-1), q.shape[1]).double()
            distribution = torch.where(
                distribution.sum(-1, keepdim=True) > 0, distribution / distribution.sum(-1, keepdim=True), lowest
            )
            undrawn = undrawn.scatter(-1, token, False)
        total = total * distribution.gather(-1, token)[..., 0]
    return total


def node_strings(world: World, tokens: Int[Tensor, "a n"], shape: TreeShape, start: Any = 0) -> Int[Tensor, "a n"]:
    """The string that ends in each node, of trees that hang below the strings `start`."""
    strings = [torch.zeros_like(tokens[:, 0]) + start]
    for node in range(1, shape.num_nodes):
        parent = strings[int(shape.parents[node])]
        strings.append(parent * world.tokens + 1 + tokens[:, node])
    return torch.stack(strings, 1)


def outcome(
    world: World, verifier: RejectionVerifier, draft: DraftTree, weights: Float64[Tensor, " a"]
) -> Float64[Tensor, " w"]:
    """Return the distribution of whole strings, from the probability of each end of the walk and its distribution."""
    shape, many, nodes = draft.shape, repeated(draft, BASE - 1), torch.arange(draft.shape.num_nodes)
    # the chance of each node to be accepted once it is tested; the root's means nothing
    rates = thresholds(
        lambda tried: shape.ancestors[walk_to_each(world, verifier, many, tried).end, nodes], draft.tokens.shape
    )
    check_description(world, verifier, draft, rates)
    reach, refused = [weights], torch.ones_like(rates)  # refused: all children of a node that were tested so far
    for node in range(1, shape.num_nodes):
        parent = int(shape.parents[node])
        reach.append(reach[parent] * refused[:, parent] * rates[:, node])
        refused[:, parent] *= 1 - rates[:, node]
    ends = torch.stack(reach, 1) * refused
    walked = walk_to_each(world, verifier, draft)
    came = walked.end == nodes
    assert float(ends[~came].sum()) < SLACK, "an end of the walk that has a chance does not come about"
    return completed(world, draft, ends, walked.distribution)


def completed(
    world: World, draft: DraftTree, ends: Float64[Tensor, "a n"], next_token: Float64[Tensor, "a n v"]
) -> Float64[Tensor, " w"]:
    """Return the distribution of whole strings, from the chance of each end and the distribution of what follows it."""
    shape = draft.shape
    inside = node_strings(world, draft.tokens, shape)
    for node in range(1, shape.num_nodes):  # tokens past the end are dropped
        if int(shape.depths[node]) > world.count:
            inside[:, node] = inside[:, int(shape.parents[node])]
    mass = torch.zeros(world.first_whole + world.tokens**world.count, dtype=torch.float64)
    is_whole = inside >= world.first_whole
    mass.index_add_(0, inside[is_whole], ends[is_whole])
    below = inside[~is_whole][:, None] * world.tokens + 1 + torch.arange(world.tokens)
    mass.index_add_(0, below.flatten(), (ends[~is_whole][:, None] * next_token[~is_whole]).flatten())
    return world.completed(mass)


def thresholds(
    is_accepted: Callable[[Float64[Tensor, "t n"]], Bool[Tensor, "t n"]], size: tuple[int, ...]
) -> Float64[Tensor, "a n"]:
    """Find, digit by digit, the number below which the uniform of each node is accepted.

    `is_accepted` gets the uniforms tried for all trees at once, BASE - 1 for each tree: first the least of every tree.
    """
    found = torch.zeros(size, dtype=torch.float64)
    for digit in range(1, DIGITS + 1):
        unit = float(BASE) ** -digit
        tried = found + torch.arange(1, BASE)[:, None, None] * unit
        found += is_accepted(tried.flatten(0, 1)).view(tried.shape).sum(0) * unit
    return found


def repeated(draft: DraftTree, times: int) -> DraftTree:
    log_q = None if draft.log_q is None else draft.log_q.repeat(times, 1, 1)
    return replace(draft, tokens=draft.tokens.repeat(times, 1), log_q=log_q)


def walk_to_each(
    world: World, verifier: RejectionVerifier, draft: DraftTree, tried: Float64[Tensor, "a n"] | None = None
) -> Walked:
    """Walks each tree once for each node: ancestors are accepted, all others refused.

    The node itself is accepted too, or tested by the uniform `tried`.
    """
    shape, (trees, nodes) = draft.shape, draft.tokens.shape
    uniforms = torch.ones(nodes, trees, nodes, max(shape.widths), dtype=torch.float64)
    for node in range(1, nodes):
        for other in range(1, nodes):
            if shape.ancestors[node, other]:
                uniforms[node, :, shape.parents[other], shape.ranks[other]] = 0.0
        if tried is not None:
            uniforms[node, :, shape.parents[node], shape.ranks[node]] = tried[:, node]
    walked = walk(world, verifier, repeated(draft, nodes), uniforms.flatten(0, 1))
    return Walked(walked.end.view(nodes, trees).T, walked.distribution.view(nodes, trees, -1).transpose(0, 1))


def walk(
    world: World, verifier: RejectionVerifier | TraversalVerifier, draft: DraftTree, uniforms: Float64[Tensor, "b n w"]
) -> Walked:
    """Run the real verifier and record the distribution that it samples from."""
    read: list[Tensor] = []

    def draw(log_p: Tensor, *others: object) -> Tensor:
        read.append(log_p[:, 0].exp())
        return log_p.argmax(-1)

    watched = copy.copy(verifier)
    object.__setattr__(watched, "draw", draw)
    log_p = world.log_p(node_strings(world, draft.tokens, draft.shape))
    noise = Forced(uniforms)
    rows = GivenRows(log_p, draft.shape.depths.expand(draft.tokens.shape), noise)
    verdict = watched.verify(draft, rows, noise)
    path = torch.nn.functional.pad(verdict.path, (1, 0))
    return Walked(path.gather(1, verdict.length[:, None])[:, 0], read[-1])


def check_description(
    world: World, verifier: RejectionVerifier, draft: DraftTree, rates: Float64[Tensor, "a n"]
) -> None:
    """Check that walks with random uniforms take, at each node, the first child whose uniform is below its rate."""
    shape = draft.shape
    generator = torch.Generator().manual_seed(0)
    size = (*draft.tokens.shape, max(shape.widths))
    for _ in range(3):
        uniforms = torch.rand(size, dtype=torch.float64, generator=generator)
        end = torch.zeros_like(draft.tokens[:, 0])
        for node in range(1, shape.num_nodes):  # nodes stand by depth, then by rank
            parent = int(shape.parents[node])
            end = torch.where((end == parent) & (uniforms[:, parent, shape.ranks[node]] < rates[:, node]), node, end)
        found = walk(world, verifier, draft, uniforms).end
        assert torch.equal(found, end), "the walk does not test children one by one against thresholds"
