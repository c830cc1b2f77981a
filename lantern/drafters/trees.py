"""Shapes of draft trees.

Static trees have the same shape at every step and are written in child ranks as in EAGLE-1 (arXiv:2401.15077). Of a
dynamic tree each image keeps its best candidates, in tensors of constant size.
"""

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.config import MAX_NODES, nearest
from lantern.core.sampling import Noise
from lantern.core.types import Drafter, DraftTree, Prompt, TreeShape, ancestors_of

Choice = tuple[int, ...]
# Probabilities that Gumbel match takes the child of each rank, for an average drafter (measured on 500 pairs of
# distributions with a total variation of 0.53 between p and q).
RATES = (0.424, 0.115, 0.065, 0.055, 0.025, 0.025, 0.025, 0.025, *(0.0105,) * 8)
per_device = cache  # trees are values: equal ones share what is made of them; no limit, since graphs read the memory
MAX_SPELLING = 4000  # characters of a spelled tree


@dataclass(frozen=True)
class DepthPlan:
    """The plan of one depth: its `f` inner nodes are extended, each by its `width` best tokens.

    `picks` are the indices of the next depth's nodes among these `f x width` tokens, `pairs` those of the f nodes among
    the tokens of the depth above, `parents` those of their parents among its inner nodes. A drafter stages inner nodes,
    but the root, in node order: `first` is the place of the first of the f, `ancestors` marks those that each sees, and
    itself.
    """

    width: int
    first: int
    picks: Int[Tensor, " m"]
    pairs: Int[Tensor, " f"]
    parents: Int[Tensor, " f"]
    ancestors: Bool[Tensor, "f i"]


@dataclass(frozen=True)
class StaticTree:
    """A tree of nodes named by the child ranks along their path: (0, 2) is the third child of the first child.

        StaticTree(((0,), (1,), (0, 0)))        root
                                                /  \\
                                              (0)  (1)
                                               |
                                             (0, 0)

    Nodes are ordered by depth, then by rank. ValueError for a node without its parent or the sibling before it.
    """

    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        known = set(self.choices)
        if not known or len(known) != len(self.choices) or () in known:
            raise ValueError("a static tree is a list of different, non-empty tuples of child ranks, at least one")
        for choice in self.choices:
            parent, rank = choice[:-1], choice[-1]
            if parent and parent not in known:
                raise ValueError(f"node {choice} has no parent {parent} in the tree: add it")
            if rank < 0 or (rank > 0 and (*parent, rank - 1) not in known):
                raise ValueError(f"node {choice} lacks the sibling {(*parent, rank - 1)} in the tree: add it")
        object.__setattr__(self, "choices", tuple(sorted(self.choices, key=lambda choice: (len(choice), choice))))

    @property
    def max_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.choices[-1])

    @property
    def width(self) -> int:
        """Largest number of children of a node."""
        return max(choice[-1] for choice in self.choices) + 1

    @property
    def num_inner(self) -> int:
        """Nodes other than the root that have children."""
        return len({choice[:-1] for choice in self.choices if len(choice) > 1})

    @property
    def spelling(self) -> str:
        """Its nodes as text, "0 1 0.0" for the tree above; `named` accepts it."""
        return " ".join(".".join(map(str, choice)) for choice in self.choices)

    @per_device
    def shape(self, device: torch.device | str = "cpu") -> TreeShape:
        """Return parents, ranks, depths and ancestors as tensors, cached per device."""
        choices: list[Choice] = [(), *self.choices]
        number = {choice: node for node, choice in enumerate(choices)}
        parents = [number[choice[:-1]] for choice in choices]
        widths = [max(choice[-1] for choice in choices if len(choice) == depth + 1) + 1 for depth in range(self.depth)]
        ranks, depths = [choice[-1] if choice else 0 for choice in choices], list(map(len, choices))
        up, ranks, depths = (torch.tensor(part, device=device) for part in (parents, ranks, depths))
        return TreeShape(up, ranks, depths, ancestors_of(up, self.depth), tuple(widths))

    @per_device
    def plan(self, device: torch.device | str = "cpu") -> tuple[tuple[DepthPlan, ...], Tensor, Tensor]:
        """Return one plan for each depth that has children, the root's first, and two indices, cached per device.

        The first is the index of each node among the root and the best tokens of these depths, the second its number
        among root and inner nodes in node order, 0 for leaves.
        """
        shape, inner, levels, order, start = self.shape(), self.inner_nodes()[1:].tolist(), list[DepthPlan](), [0], 1
        parents, ranks = shape.parents.tolist(), shape.ranks.tolist()
        places, frontier, above, first = {0: 0}, [0], [0], 0
        for width in shape.widths:
            children = [node for node in range(1, len(parents)) if parents[node] in frontier]
            picks = [frontier.index(parents[child]) * width + ranks[child] for child in children]
            pairs, upper = [places[node] for node in frontier], [above.index(parents[node]) for node in frontier]
            index, pairs, upper = (torch.tensor(part, device=device) for part in (picks, pairs, upper))
            seen = shape.ancestors[frontier][:, inner].to(device)
            levels.append(DepthPlan(width, first, index, pairs, upper, seen))
            order += [pick + start for pick in picks]
            start += len(frontier) * width
            first += len(frontier) if frontier != [0] else 0
            places, above = dict(zip(children, picks, strict=True)), frontier
            frontier = [child for child in children if child in inner]
        is_inner = shape.has_children
        numbers = torch.where(is_inner, is_inner.cumsum(0) - 1, 0)
        return tuple(levels), torch.tensor(order, device=device), numbers.to(device)

    @per_device
    def inner_nodes(self, device: torch.device | str = "cpu") -> Int[Tensor, " m"]:
        """Return the nodes that have children, the root included, in node order."""
        return self.shape().has_children.nonzero()[:, 0].to(device)


def chain(length: int) -> StaticTree:
    """Return a tree without branches."""
    return StaticTree(tuple((0,) * depth for depth in range(1, length + 1)))


def from_widths(widths: Sequence[int]) -> StaticTree:
    """Return a tree with `widths[d]` nodes at depth d + 1.

    The nodes of a depth get their children round-robin, the best-ranked first: widths (4, 6) give the four nodes of
    depth 1 two, two, one and one children.
    """
    choices: list[Choice] = []
    level: list[Choice] = [()]
    for width in widths:
        children = [(*level[i % len(level)], i // len(level)) for i in range(width)]
        level = sorted(children, key=lambda choice: (sum(choice), choice))
        choices += level
    return StaticTree(tuple(choices))


def grown(nodes: int, depth: int, rates: Sequence[float] = RATES) -> StaticTree:
    """Return the tree of this many drafted nodes, no deeper than `depth`, with the highest mean accepted length.

    `rates[r]` is the probability that the child of rank r is accepted, the same below every node. The value of a node
    is the product along its path, and the nodes of highest value are taken. A node has no more children than there are
    rates, so a shallow tree may have fewer nodes.
    """
    open_nodes: list[tuple[float, Choice]] = [(-rates[0], (0,))]
    choices: list[Choice] = []
    while open_nodes and len(choices) < nodes:
        value, choice = heapq.heappop(open_nodes)
        choices.append(choice)
        rank = choice[-1]
        if rank + 1 < len(rates):
            heapq.heappush(open_nodes, (value / rates[rank] * rates[rank + 1], (*choice[:-1], rank + 1)))
        if len(choice) < depth:
            heapq.heappush(open_nodes, (value * rates[0], (*choice, 0)))
    return StaticTree(tuple(choices))


def spine(length: int, tree: StaticTree) -> StaticTree:
    """Return a chain of `length` nodes with `tree` below its last node."""
    last = (0,) * length
    return StaticTree((*chain(length).choices, *((*last, *choice) for choice in tree.choices)))


def named(name: str) -> StaticTree:
    """Return a tree by its name in `TREES`, "chain_N", "grown_N_D" (N nodes to depth D), or a tree's `spelling`.

    "spine_S_N_D" is a chain of S nodes with the tree "grown_N_D" below its end.

    ValueError for another name lists these and suggests the nearest. Of the trees of LANTERN++ (arXiv:2502.06352)
    "mc_sim_7b_63", "naive_extend_57" and "chain" are included.
    """
    if name in TREES:
        return TREES[name]
    if len(name) <= MAX_SPELLING and re.fullmatch(r"\d+(\.\d+)*( \d+(\.\d+)*)*", name, re.ASCII):
        return StaticTree(tuple(tuple(map(int, word.split("."))) for word in name.split()))
    if found := re.fullmatch(r"chain_([1-9]\d?)", name):
        return chain(int(found[1]))
    if found := re.fullmatch(r"grown_([1-9]\d{0,2})_([1-9]\d?)", name):
        return grown(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"spine_([1-9]\d?)_([1-9]\d{0,2})_([1-9]\d?)", name):
        return spine(int(found[1]), grown(int(found[2]), int(found[3])))
    sizes = f"N to {MAX_NODES}, S, D and a chain's N from 1 to 99"
    known = f"{', '.join(TREES)}, chain_N, grown_N_D, spine_S_N_D ({sizes}), nodes such as '0 1 0.0'"
    raise ValueError(f'tree "{name[:80]}" is unknown, wanted one of {known}{nearest(name, TREES)}')


def _parse(text: str) -> StaticTree:
    return StaticTree(tuple(tuple(map(int, word)) for word in text.split()))


TREES = {
    # 25 drafted nodes, 4-8-8-3-2, despite its name; the default for Lumina in LANTERN++
    "mc_sim_7b_63": _parse(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    # 57 drafted nodes, 5-13-16-14-9; the default for LlamaGen in LANTERN++
    "naive_extend_57": _parse(
        "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40"
        " 000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200"
        " 0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200"
        " 00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
    "chain": chain(5),  # LANTERN++'s chain: five drafted nodes
    "narrow_10": from_widths((3, 3, 2, 1, 1)),
    "wide_15": from_widths((6, 5, 3, 1)),
}


class TreeDrafter(Drafter):
    """Base class of drafters whose every tree has the shape of `tree`, or with several shapes at most its width."""

    tree: StaticTree

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Keep the noise, and the constants of the tree on the prompt's device."""
        device, self.noise = prompt.mask.device, noise
        self.shape, self.inner_nodes = self.tree.shape(device), self.tree.inner_nodes(device)
        self.levels, self.order, self.log_q_rows = self.tree.plan(device)

    def drafted(self, ranked: list[Int[Tensor, "b _"]], log_qs: list[Float[Tensor, "b _ v"]]) -> DraftTree:
        """Return the tree of the root and the best tokens of every depth, with log q if the drafter records it."""
        log_q = torch.cat(log_qs, 1)[:, self.log_q_rows] if self.records_log_q else None
        return DraftTree(torch.cat(ranked, 1)[:, self.order], self.shape, self.mode, log_q, self.inner_nodes)

    @property
    def max_nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return self.tree.max_nodes

    @property
    def depth(self) -> int:
        """Depth of the tree."""
        return self.tree.depth


@dataclass(frozen=True)
class Candidates:
    """Nodes that may be drafted, numbered from the root (0), depth by depth.

    `places` are their numbers among the children of their depth's frontier, `width` of each of its nodes in order.
    `values` are sums of log probabilities along the path, which never rise with depth.
    """

    tokens: Int[Tensor, "b p"]
    places: Int[Tensor, "b p"]
    values: Float[Tensor, "b p"]

    @property
    def count(self) -> int:
        """Number of candidates."""
        return self.tokens.shape[1]

    @classmethod
    def joined(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """Return the candidates of all depths."""
        return cls(*(torch.cat(values, 1) for values in zip(*(vars(part).values() for part in parts), strict=True)))

    def best_nodes(self, nodes: int) -> Int[Tensor, "b n"]:
        """Return the root and the `nodes` best others, in order; values make the parent of each node included.

        values   root 0 | a -1, b -2 | below a: c -1.5, below b: d -2.5
        best_nodes(2)    [root, a, c]
        """
        best = self.values[:, 1:].topk(min(nodes, self.count - 1), dim=1, sorted=False).indices + 1
        return torch.nn.functional.pad(best.sort(dim=1).values, (1, 0))


@dataclass(frozen=True)
class Frontier:
    """The extended nodes of one depth: which of its candidates they are, and what their children need.

    `parents` are indices in the frontier above; `seen` marks the staged nodes that each sees, its own depth last.
    `joint` is `reach` where nothing reads it.
    """

    best: Int[Tensor, "b f"]
    parents: Int[Tensor, "b f"]
    tokens: Int[Tensor, "b f"]
    reach: Float[Tensor, "b f"]
    joint: Float[Tensor, "b f"]
    seen: Bool[Tensor, "b f i"]

    def below(
        self,
        children: Candidates,
        joint: Float[Tensor, "b m"] | None,
        pick: Int[Tensor, "b m"] | None,
        identity: Bool[Tensor, "w w"],
    ) -> "Frontier":
        """Return the best of its children, which are those at `pick` (None: all); `identity` has the width's size."""
        width = len(identity)
        reach, best = children.values.topk(min(width, children.count), dim=1)
        parents = (best if pick is None else pick.gather(1, best)) // width
        own = identity[: best.shape[1], : best.shape[1]].expand(len(best), -1, -1)
        above = self.seen.gather(1, parents[..., None].expand(-1, -1, self.seen.shape[2]))
        tokens, joint = children.tokens.gather(1, best), reach if joint is None else joint.gather(1, best)
        return Frontier(best, parents, tokens, reach, joint, torch.cat([above, own], 2))


def shape_of(
    candidates: Candidates,
    kept: Int[Tensor, "b n"],
    inner: Int[Tensor, "b i"],
    depths: Int[Tensor, " p"],
    starts: Int[Tensor, " p"],
    widths: tuple[int, ...],
) -> TreeShape:
    """Return the shape of the tree of these candidates, in which a parent comes before its children.

    `inner` are the candidates of all frontiers, `starts` the number of them before the frontier of each one's parent,
    `depths` those of all candidates, `widths` those of the shape.
    """
    places = candidates.places.gather(1, kept)
    depth, start = (each.expand_as(candidates.places).gather(1, kept) for each in (depths, starts))
    above = inner.gather(1, start + places // widths[0])
    order = torch.arange(kept.shape[1], device=kept.device)
    numbers = torch.zeros_like(candidates.tokens).scatter(1, kept, order.expand_as(kept))
    parents = numbers.gather(1, above)
    return TreeShape(parents, places % widths[0], depth, ancestors_of(parents, len(widths)), widths)
