"""Dynamic trees with EAGLE modules: grown depth by depth where a policy estimates the highest probabilities."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftTree, Prompt, Step, Target, Traits, rows_at
from lantern.decoding.statistics import Readback
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.policies.history import PRIOR, neighbours, updated_map
from lantern.drafters.policies.policy import (
    MAX_DEPTH,
    MAX_LOG,
    MIN_LOG,
    STOPPED,
    Layer,
    Policy,
    Pool,
    match_chances,
    padded_beam,
    traits_of,
)
from lantern.drafters.trees.dynamic import Candidates, Frontier, shape_of
from lantern.drafters.trees.static import from_widths, grown

SPAN = 1 << 16  # a depth and a number of nodes are sent to the host as one number
STRIDE = 4  # sizes of trees are multiples of this, so that few sizes are compiled


@dataclass(frozen=True)
class Growth:
    """Largest size of trees: `nodes` drafted nodes, `width` extended nodes per depth with `width` children, `depth`.

    `spread` is how far the target's scores scatter around the drafter's (`match_chances`). With `adaptive` a policy
    with `saves` chooses the size of the next tree; the host reads it one step later. ValueError for invalid sizes.
    """

    nodes: int = 15
    width: int = 8
    depth: int = 6
    spread: float = 1.25
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.width < 1 or not 1 <= self.depth <= MAX_DEPTH or self.spread <= 0:
            raise ValueError(
                f"nodes {self.nodes}, width {self.width}, depth {self.depth}, spread {self.spread}: wanted at least "
                f"one node, a width from 1, a depth from 1 to {MAX_DEPTH} and a spread above 0"
            )

    @property
    def level_sizes(self) -> list[int]:
        """Nodes of each depth where they are decided before sampling: those of the best static tree."""
        depths = [len(choice) for choice in grown(self.nodes, self.depth).choices]
        return [depths.count(depth) for depth in range(1, max(depths) + 1)]


class GrowingDrafter(EagleDrafter):
    """Drafts trees whose shape a policy chooses for each image and step.

    At each depth the policy gives every candidate, `width` children of `width` nodes, its log probability given the
    parent. The best candidates are extended, and the best of all are verified. In mode "sampled" no sampled token may
    be dropped, so the number of nodes of each depth is fixed, and their parents are chosen before they are sampled.
    ValueError for a policy that reads sampled tokens in that mode.
    """

    def __init__(self, module: Eagle, target: Target, *, policy: Policy, growth: Growth, **how: Any) -> None:
        width = min(growth.width, target.config.vocab_size)
        self.growth = dataclasses.replace(growth, width=width)
        super().__init__(module, target, tree=from_widths((width,) * growth.depth), **how)
        if self.mode == "sampled" and not policy.is_predictable:
            raise ValueError(
                f"{type(policy).__name__} chooses the tested tokens after they are sampled, which rejection does not "
                'allow: use verifier "gumbel"'
            )
        self.policy, self.records_traits = policy, False
        self.sizes = None
        if self.mode == "sampled":
            self.sizes = [min(size, width if d == 0 else width * width) for d, size in enumerate(growth.level_sizes)]

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree, the root included."""
        return 1 + (self.growth.nodes if self.sizes is None else sum(self.sizes))

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return self.growth.depth if self.sizes is None else len(self.sizes)

    @property
    def needs_host(self) -> bool:
        """Whether the host reads the last step to choose the next tree's size, which CUDA graphs do not allow."""
        return self.growth.adaptive and self.policy.saves

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt and reset the policy."""
        super().begin(prompt, noise)
        images, device = len(prompt.mask), prompt.features.device
        self.side = round(self.count**0.5)
        self.held.seen = torch.full((images, self.count + 1), PRIOR, dtype=torch.float32, device=device)
        self.policy.begin(images, device)
        self._size, self._wanted, self._readback = (self.growth.nodes, self.depth), None, Readback(device)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens, and update the policy with what was accepted."""
        super().observe(step)
        if step.verdict is None:  # given tokens
            return
        self.policy.observe(step)
        if self._reads_neighbours:
            self.held.seen = updated_map(self.held.seen, step, self.side)

    @property
    def _reads_neighbours(self) -> bool:
        return self.policy.reads_neighbours or self.records_traits

    def propose(self) -> DraftTree:
        """Grow the trees, with one pass of the drafter per depth."""
        nodes, passes = self._next_size()
        features = self._read_pending()
        found, front = Candidates.of_root(self._root), Frontier.of_root(self._root)
        log_qs, fronts, layers, picks = [], [], [], []
        for depth in range(passes):
            if depth > 0:
                above = features.take_along_dim(front.parents[:, None, :, None], 2)
                first = front.seen.shape[2] - front.seen.shape[1]
                features = self._run(above, front.tokens, front.seen, first=first, depth=depth)
            log_qs.append(self.log_q(self._logits(features), self._followed(depth)))
            layer, tokens = self._look(log_qs[-1], front, depth)
            shown = layer if not self.policy.is_predictable else dataclasses.replace(layer, log_q=None, match=None)
            fronts.append(front)
            layers.append(layer)
            found, front, pick = self._add(found, front, layer, tokens, self.policy.chances(shown))
            picks.append(pick)
        kept = found.best_nodes(nodes if self.sizes is None else found.count)
        self._request_size(found, passes)
        shape = shape_of(found, kept, (self.growth.width,) * passes)
        log_q = _log_q_of_nodes(log_qs, fronts, found, kept) if self.records_log_q else None
        traits = self._traits(layers, picks, kept) if self.records_traits else None
        return DraftTree(found.tokens.gather(1, kept), shape, self.mode, log_q, traits=traits)

    def _look(self, log_q: Float[Tensor, "b f v"], front: Frontier, depth: int) -> tuple[Layer, Int[Tensor, "b f k"]]:
        """Return what is known of a frontier and its candidates, and their tokens in sampling order."""
        places = self._followed(depth)
        scores = self.scores(log_q, places)
        tokens = scores.topk(self.growth.width, dim=-1).indices
        q = log_q.exp()
        near = self.held.seen[:, :3]
        if self._reads_neighbours:
            near = neighbours(self.held.seen, places, self.known, self.side)[:, 0]
        layer = Layer(
            depth=depth,
            side=self.side,
            places=places[:, 0],
            reach=front.reach,
            joint=front.joint,
            entropy=-(q * log_q.clamp(min=-100.0)).sum(-1),
            collision=q.square().sum(-1),
            near=near,
            width=self.growth.width,
            log_q=log_q.gather(-1, tokens),
            match=match_chances(scores, self.growth.spread).gather(-1, tokens),
        )
        return layer, tokens

    def _add(
        self,
        found: Candidates,
        front: Frontier,
        layer: Layer,
        tokens: Int[Tensor, "b f k"],
        chances: Float[Tensor, "b f k"],
    ) -> tuple[Candidates, Frontier, Int[Tensor, "b m"]]:
        """Return the candidates with those of a further depth, the next frontier, and the indices of the new ones."""
        assert layer.match is not None
        is_outside = (self.known + layer.depth >= self.count)[:, None, None]
        is_live = (chances > -torch.inf) & ~is_outside
        chances = torch.where(is_live, chances.clamp(MIN_LOG, MAX_LOG), STOPPED)
        values = (front.reach[..., None] + chances).flatten(1)
        pick = self._picked(values, layer.depth)
        joint = (front.joint[..., None] + layer.match.clamp(min=MIN_LOG)).flatten(1).gather(1, pick)
        slots = pick // self.growth.width
        more = Candidates(
            tokens.flatten(1).gather(1, pick),
            front.numbers.gather(1, slots),
            pick % self.growth.width,
            torch.full_like(pick, layer.depth + 1),
            values.gather(1, pick),
        )
        after = front.below(more, slots, joint, first=found.count, width=self.growth.width)
        return found.and_more(more), after, pick

    def _picked(self, values: Float[Tensor, "b m"], depth: int) -> Int[Tensor, "b k"]:
        """Return which children of a frontier are candidates: all, or the best up to the size of their depth."""
        order = torch.arange(values.shape[1], device=values.device)
        if self.sizes is None:
            return order.expand_as(values)
        # Among equals the earlier sibling: rejection tests samples in order and skips none.
        elder = order % self.growth.width * MAX_LOG
        size = min(self.sizes[depth], values.shape[1])
        return (values + elder).topk(size, dim=1).indices.sort(dim=1).values

    def _traits(self, layers: list[Layer], picks: list[Int[Tensor, "b m"]], kept: Int[Tensor, "b n"]) -> Traits:
        """Return what is known of the nodes of the tree, for the records."""
        chosen = [
            traits_of(layer).flatten(1, 2).take_along_dim(pick[..., None], 1)
            for layer, pick in zip(layers, picks, strict=True)
        ]
        every = torch.cat([torch.zeros_like(chosen[0][:, :1]), *chosen], 1)
        beams = torch.stack([padded_beam(layer.joint, self.growth.width) for layer in layers], 1)[:, 1:]
        return Traits(every.take_along_dim(kept[..., None], 1), beams)

    def _request_size(self, found: Candidates, passes: int) -> None:
        """Store the size that the next tree should have, the largest over the images, for the host to read."""
        if not self.needs_host:
            return
        wanted = self.policy.preferred_size(Pool(found.values[:, 1:], found.depths[0, 1:], passes))
        nodes, depth = (torch.where(self.known < self.count, size, 0).amax() for size in wanted)
        self._wanted = -(depth * SPAN + nodes.clamp(max=self.growth.nodes))[None]

    def _next_size(self) -> tuple[int, int]:
        """Return the drafted nodes and passes of this step, as the last step (on a GPU the one before) requested."""
        if self._wanted is not None:
            packed = self._readback.read(self._wanted)
            if packed is not None:
                depth, nodes = divmod(-packed, SPAN)
                nodes = -(-max(nodes, 1) // STRIDE) * STRIDE
                self._size = min(nodes, self.growth.nodes), min(max(depth, 1), self.growth.depth)
        return self._size


def _log_q_of_nodes(
    log_qs: list[Float[Tensor, "b f v"]], fronts: list[Frontier], found: Candidates, kept: Int[Tensor, "b n"]
) -> Float[Tensor, "b n v"]:
    """Return for each node the log q of its children; for leaves that of the root."""
    numbers = torch.cat([front.numbers for front in fronts], 1)
    order = torch.arange(numbers.shape[1], device=kept.device).expand_as(numbers)
    return rows_at(torch.cat(log_qs, 1), torch.zeros_like(found.tokens).scatter(1, numbers, order).gather(1, kept))
