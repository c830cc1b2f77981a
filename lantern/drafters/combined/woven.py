"""Woven trees: the drafts of a drafter and the target's own samples of the last pass in one tree.

A Jacobi window holds the target's samples under a prefix that was partly wrong. A drafter reads the true prefix and
guesses. Their errors differ, and with Gumbel match one tree may hold both:

    root - J1 - J2 - J3 - J4 ...    J: the target's samples for these places in the last pass; a chain of `window`
         |    `- e                  e: the best of log m + g, m = share x (the target's distribution in the last pass)
         |- e - J2 - J3                    + (1 - share) x (the drafter's distribution), g the target's noise
         `- e - J2

The first child of every node is the known sample for its place, if there is one. The code that ends a walk is not a
child of the node where the walk ended. The child nearest to it by the target's embeddings replaces it: samples are read
from there along first children, and past their end along the window. Places that were never scored get the drafter's
best code, and past its depth the code before. Any drafter that grows a static tree with Gumbel match from distributions
over all codes can be woven (`MethodSpec.weavable`).
"""

import dataclasses
import math
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Drafter, DrafterDefaults, DraftMode, DraftTree, Kept, NoiseSource, Prefill, Step, Target
from lantern.drafters.base import Chooser
from lantern.drafters.trees.static import Choice, StaticTree, named
from lantern.methods.spec import DrafterContext, Method, MethodSpec, Setting
from lantern.verifiers.relaxations.bounded import SETTINGS as BOUNDED
from lantern.verifiers.relaxations.bounded import Bounded


class Strand(Drafter, Protocol):
    """A drafter whose children another object can choose."""

    module: Any

    @property
    def kv_length(self) -> int | None:
        """Keys and values that a row of a pass reads; None for drafters without attention."""
        ...

    def weave(self, chooser: Chooser, most_committed: int) -> None:
        """Let `chooser` choose the children, in trees from which a step may commit up to `most_committed` codes."""
        ...


def with_chain(tree: StaticTree, length: int) -> StaticTree:
    """Return the tree with a chain of first children down to this depth."""
    return StaticTree(tuple({*tree.choices, *((0,) * depth for depth in range(1, length + 1))}))


def followers(tree: StaticTree, length: int) -> list[list[int]]:
    """Return for each node the nodes whose samples are for the `length` places behind its own; -1 is none.

    These are its first child, the first child of that and so on, and where they end those of the root at that depth:

        root 0 - 1 - 3 - 4 - 5     of node 0: 1 3 4 5
               `- 2 - 6            of node 2: 6 4 5 -1, its own chain, then the rest of the root's
    """
    choices: list[Choice] = [(), *tree.choices]
    number = {choice: i for i, choice in enumerate(choices)}
    found = []
    for choice in choices:
        below = [(*choice, *(0,) * step) for step in range(1, length + 1)]
        found.append([number.get(own, number.get((0,) * len(own), -1)) for own in below])
    return found


def offspring(tree: StaticTree) -> list[list[int]]:
    """Return the children of each node, in rows of one length; -1 is none."""
    choices: list[Choice] = [(), *tree.choices]
    found = [[i for i, child in enumerate(choices) if child and child[:-1] == choice] for choice in choices]
    return [row + [-1] * (max(map(len, found)) - len(row)) for row in found]


class WovenDrafter(DrafterDefaults):
    """Chooses the children of `tree`, which `inner` grows, and extends it by the target's last samples to `window`.

    `share`, from 0 to below 1, is the weight of the target's last distribution in the ranking of children other than
    the first. `inner` must draft `tree`. ValueError for another share, for a tree without a chain of first children
    down to its depth, and for a window shorter than the depth of the tree.
    """

    mode: DraftMode = "gumbel"
    reads_leftovers = True

    def __init__(
        self,
        inner: Strand,
        target: Target,
        *,
        tree: StaticTree,
        sampling: Sampling,
        window: int = 16,
        share: float = 0.5,
        records_log_q: bool = False,
    ) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"share is {share}, wanted from 0 to below 1: the rest is the drafter's")
        if window < tree.depth:
            raise ValueError(f"the window is {window}, wanted at least {tree.depth}, the depth of the tree")
        if with_chain(tree, tree.depth) != tree or inner.max_nodes != tree.max_nodes:
            raise ValueError("the drafter has another tree, or one without a chain of first children: use `with_chain`")
        # On a grid with fewer codes than the tree is deep, nodes past the end of the picture have no effect.
        self.window = max(min(window, target.config.block_size), tree.depth)
        self.target, self.tree, self.whole = target, tree, with_chain(tree, self.window)
        self.share, self.records_log_q = share, records_log_q
        self.draft_sampling = sampling.untruncated() if sampling.is_greedy else sampling
        self.count = target.config.block_size
        self.inner, self.members = inner, (inner, *inner.members)
        self.needs_whole_prefix, self.taps, self.reads_kept = inner.needs_whole_prefix, inner.taps, inner.reads_kept
        self._mixtures: list[Tensor] = []  # of each depth, while a tree is grown
        inner.weave(self, self.window + 1)

    @property
    def module(self) -> Any:
        """The network of its drafter, None if there is none."""
        return self.inner.module

    @property
    def kv_length(self) -> int | None:
        """Keys and values that a row of its drafter's pass reads, None if it has no cache."""
        return self.inner.kv_length

    @property
    def max_nodes(self) -> int:
        """Nodes of the tree and of the chain behind it, the root included."""
        return self.whole.max_nodes

    @property
    def depth(self) -> int:
        """Depth of the chain."""
        return self.window

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Clear all samples: the window repeats the first code."""
        self.inner.begin(prefill, noise)
        images, device = len(prefill.first), prefill.first.device
        self.noise, self._known, self._mixtures = noise, torch.ones_like(prefill.first), []
        self._levels, self._whole_shape = self.tree.levels(device), self.whole.shape(device)
        self._whole_rows, self._whole_inner = self.whole.log_q_rows(device), self.whole.inner(device)
        self._followers = torch.tensor(followers(self.whole, self.window), device=device)
        self._children = torch.tensor(offspring(self.whole), device=device)
        self._steps = torch.arange(self.window, device=device)
        self._samples = prefill.first[:, None].expand(-1, self.window).contiguous()
        self._is_known = torch.zeros(images, self.window, dtype=torch.bool, device=device)
        depths = self.window if self.records_log_q else self.tree.depth
        size = (images, depths, self.target.config.vocab_size)
        self._last_log_p = torch.full(size, -torch.inf, device=device)

    def read_kept(self, kept: Kept) -> None:
        """Pass kept codes to the drafter: the window repeats the last of them."""
        self.inner.read_kept(kept)
        self._known = self._known + kept.codes.shape[1]
        self._samples = kept.codes[:, -1:].expand(-1, self.window).contiguous()

    def observe(self, step: Step) -> None:
        """Pass the step to the drafter, and read the samples and distributions of the places behind it."""
        self.inner.observe(step)
        assert step.verdict is not None
        self._known = self._known + step.counts
        visited = torch.nn.functional.pad(step.verdict.path, (1, 0))
        end = visited.gather(1, step.verdict.length[:, None])
        nodes = self._source_nodes(step, end)
        self._is_known = nodes >= 0
        # The last known sample is repeated: nodes are in order, so the greatest index so far is the last known one.
        known = torch.where(self._is_known, self._steps, -1).cummax(1).values
        last = torch.where(known >= 0, nodes.gather(1, known.clamp(min=0)), end)
        left = step.verdict.leftovers
        depths = self._last_log_p.shape[1]
        log_p = self._read_log_p(step, last if left is None else last[:, :depths])
        # Without leftovers the temperature is 0, and the most likely code is the sample.
        self._samples = log_p.argmax(-1) if left is None else left.tokens.gather(1, last)
        self._last_log_p = log_p[:, :depths].masked_fill(~self._is_known[:, :depths, None], -torch.inf)

    def propose(self) -> DraftTree:
        """Return the drafter's tree, with the rest of the window behind it."""
        drafted = self.inner.propose().tokens
        codes = torch.cat([drafted, self._samples[:, self.tree.depth :]], 1)
        if not self.records_log_q:
            return DraftTree(codes, self._whole_shape, self.mode, None, self._whole_inner)
        mixtures, self._mixtures = self._mixtures, []
        own = [log_m.expand(-1, len(level.pairs), -1) for log_m, level in zip(mixtures, self._levels, strict=True)]
        log_q = torch.cat([*own, self._last_log_p[:, self.tree.depth :]], 1)[:, self._whole_rows]
        return DraftTree(codes, self._whole_shape, self.mode, log_q, self._whole_inner)

    def children(self, log_q: Float[Tensor, "b f v"], depth: int, width: int) -> Int[Tensor, "b f k"]:
        """Return the known sample for the place, then the best codes of the mixture."""
        log_m = self._mixed(log_q, depth)
        if self.records_log_q:
            self._mixtures.append(log_m)
        scores = log_m + self.noise.gumbel(self._places(depth, 1))
        samples = self._samples[:, depth, None, None].expand(-1, scores.shape[1], -1)
        first = scores.gather(2, samples).masked_fill(self._is_known[:, depth, None, None], torch.inf)
        return scores.scatter(2, samples, first).topk(width, dim=-1).indices

    def _mixed(self, log_q: Float[Tensor, "b f v"], depth: int) -> Float[Tensor, "b f v"]:
        """Return log q mixed with the target's distribution of the last pass, where that is known."""
        if self.share == 0:
            return log_q
        last = self._last_log_p[:, depth, None] + math.log(self.share)
        mixed = torch.logaddexp(last, log_q + math.log1p(-self.share))
        return torch.where(self._is_known[:, depth, None, None], mixed, log_q)

    def _source_nodes(self, step: Step, end: Int[Tensor, "b 1"]) -> Int[Tensor, "b w"]:
        """Return the nodes whose samples are for the next places, for walks that ended at `end`; -1 is none."""
        assert step.tree is not None and step.verdict is not None
        children = self._children[end[:, 0]]
        codes = step.tree.tokens.gather(1, children.clamp(min=0))
        embeddings = self.target.tok_embeddings
        distances = (embeddings(codes) - embeddings(step.verdict.next_token)[:, None]).float().square().sum(-1)
        nearest = children.gather(1, distances.masked_fill(children < 0, torch.inf).argmin(1, keepdim=True))
        below = torch.cat([nearest, self._followers[nearest[:, 0].clamp(min=0)][:, :-1]], 1)
        return torch.where(nearest >= 0, below, self._followers[end[:, 0]])

    def _read_log_p(self, step: Step, nodes: Int[Tensor, "b d"]) -> Float[Tensor, "b d v"]:
        """Return the target's log p at these nodes."""
        assert step.scores is not None
        logits = step.scores.logits.unflatten(0, (len(nodes), -1))
        index = nodes[:, None, :, None].expand(-1, logits.shape[1], -1, logits.shape[-1])
        return self.draft_sampling.log_probs(logits.gather(2, index), self._places(0, nodes.shape[1]))

    def _places(self, depth: int, places: int) -> Int[Tensor, "b d"]:
        """Return the numbers of the codes that follow nodes of `places` depths from `depth` on, within the image."""
        return (self._known[:, None] + self._steps[depth : depth + places]).clamp(max=self.count - 1)


def strand_of(method: Method, context: DrafterContext) -> Method:
    """Return the method whose drafter is woven, under the name of the one that weaves it; ValueError if it cannot."""
    strand = context.find(str(method.settings["drafter"]))
    if not strand.spec.weavable:
        raise ValueError(
            f'method "{method.name}": drafter "{strand.name}" has no tree that can be woven: name a method that '
            "drafts a static tree and is verified by Gumbel match, such as eagle1"
        )
    return dataclasses.replace(strand, spec=dataclasses.replace(strand.spec, name=method.name))


def build(method: Method, context: DrafterContext) -> WovenDrafter:
    """Build trees drafted as by the method that the setting `drafter` names."""
    expected = named(str(method.tree))
    tree = with_chain(expected, expected.depth)
    strand = dataclasses.replace(strand_of(method, context), tree=method.tree if tree == expected else tree.spelling)
    inner: Any = context.drafter(strand)
    settings = {name: method.settings[name] for name in ("window", "share")}
    records = context.records_log_q(method)
    return WovenDrafter(inner, context.target, tree=tree, sampling=context.sampling, records_log_q=records, **settings)


SETTINGS = (
    Setting("drafter", "eagle1", "method whose drafter grows the tree"),
    Setting("window", 16, "codes sampled ahead from the target's last pass", low=2),
    Setting("share", 0.5, "weight of the target's last distributions in the draft's", low=0, high=1),
)
METHODS = (
    MethodSpec(
        "woven",
        "a drafter's tree and the target's own last samples in one: the image of plain decoding, code for code",
        "combined",
        drafter=build,
        tree="grown_15_3",
        settings=SETTINGS,
        paper="2510.24211",
    ),
    MethodSpec(
        "bounded-woven",
        "relaxed: as woven, with the distribution moved toward what both threads of the tree expect, by at most delta",
        "combined",
        drafter=build,
        tree="grown_15_3",
        relaxation=Bounded,
        settings=(*SETTINGS, *BOUNDED),
        page="woven",
    ),
)
