"""Tree policies: they choose the nodes and the depth of a dynamic tree, in tensors of static shape.

A policy estimates for every candidate the probability that the target takes it, given that its parent was reached. The
value of a node is the product of these along its path (its reach), and the nodes of highest value are drafted. All
policies thus estimate the same quantity. Where a policy stops it returns -inf: such nodes come last, and the host may
make the next tree smaller.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from lantern.core.types import Buffers, Step
from lantern.drafters.trees import RATES

MAX_DEPTH = 12
# Log probabilities: of the least likely node that is not stopped, of a stopped node, and of the most likely one.
# MAX_DEPTH times the first is above the second, and the last keeps a child below its parent in fp32 at any depth.
MIN_LOG, STOPPED, MAX_LOG = -15.0, -200.0, -1e-3
STOPPED_BELOW = -190.0
TRAITS = ("joint", "match", "log_q", "entropy", "gap", "depth", "rank", "left", "up", "up_right", "row", "column")
PRIOR = 0.5  # acceptance at places without neighbours, and of all before the first step
LEAST, MOST = 0.05, 0.95  # bounds of the acceptance at neighbours
# Traits are divided by these, so that all are of the order of 1.
SCALES = {"joint": 10.0, "match": 5.0, "log_q": 10.0, "entropy": 8.0, "gap": 5.0, "depth": 8.0, "rank": 8.0}
SIDE_INPUTS = 4  # depth, and the acceptance at three neighbours


@dataclass(frozen=True)
class Layer:
    """Nodes of one depth, f per image, whose children are chosen out of k candidates each, in sampling order.

    `places` is the token number of the children, `side` the tokens per row. `reach` is the log
    probability of reaching a node by the policy, `joint` by the scores alone. `near` is the acceptance at the left,
    upper and upper right neighbours, from 0 to 1. `rows` are log q of all tokens, `tokens` the candidates, and
    `make_match` returns their `match`; where a policy must not read sampled tokens, both are None. What follows from
    them is computed when it is read.
    """

    depth: int
    side: int
    places: Int[Tensor, " b"]
    reach: Float[Tensor, "b f"]
    joint: Float[Tensor, "b f"]
    near: Float[Tensor, "b 3"]
    width: int
    rows: Float[Tensor, "b f v"]
    make_match: Callable[[], Float[Tensor, "b f k"]] | None
    tokens: Int[Tensor, "b f k"] | None

    @cached_property
    def entropy(self) -> Float[Tensor, "b f"]:
        """Entropy of q in nats."""
        return -(self.rows.exp() * self.rows.clamp(min=-100.0)).sum(-1)

    @cached_property
    def collision(self) -> Float[Tensor, "b f"]:
        """Sum of q squared."""
        return self.rows.exp().square().sum(-1)

    @cached_property
    def log_q(self) -> Float[Tensor, "b f k"]:
        """Log q of the candidates."""
        assert self.tokens is not None
        return self.rows.gather(-1, self.tokens)

    @cached_property
    def match(self) -> Float[Tensor, "b f k"]:
        """Log probability that a candidate is the target's own sample, by its score."""
        assert self.make_match is not None
        return self.make_match()


@dataclass(frozen=True)
class Pool:
    """All candidates of a step: the log probability of reaching each and its depth, from 1 to `deepest`."""

    values: Float[Tensor, "b p"]
    depths: Int[Tensor, " p"]
    deepest: int


class Policy:
    """Estimates acceptance probabilities, for one generation at a time.

    `is_predictable`: it reads no sampled candidate, so trees may be sampled and verified by rejection. `sizes_vary`:
    whether its trees differ in size from step to step. `reads_traits`: it reads `Layer.near` or `joint`. What it keeps
    between steps is in `held`, in tensors of constant size; what it keeps between depths of a tree begins anew at depth
    0.
    """

    is_predictable: ClassVar[bool] = False
    sizes_vary: ClassVar[bool] = True
    reads_traits: ClassVar[bool] = False

    @cached_property
    def held(self) -> Buffers:
        """What it keeps between steps."""
        return Buffers()

    def begin(self, images: int, device: torch.device) -> None:
        """Begin a generation of so many images."""

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities of the candidates given their parents; -inf where it stops."""
        raise NotImplementedError

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the number of drafted nodes and the depth of the tree that fits a step's candidates.

        It is that of all nodes that are not stopped, and at most one deeper than the step's.
        """
        return size_of(pool, not_stopped(pool.values))

    def observe(self, step: Step) -> None:
        """Read what was accepted of a step's tree."""


class StoppingPolicy(Policy):
    """Estimates that the target takes a candidate as often as it is its own sample by the scores, and stops early."""

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities to match, -inf where it stops."""
        return layer.match.masked_fill(self.stops(layer), -torch.inf)

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return which candidates are not drafted."""
        raise NotImplementedError


def check_share(name: str, share: float) -> None:
    """Raise ValueError for a share outside (0, 1)."""
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}, wanted between 0 and 1")


def match_chances(scores: Float[Tensor, "*n v"], spread: float) -> Float[Tensor, "*n v"]:
    """Return the log probability that each token is the target's own sample, given the drafter's scores log q + g.

    The target samples the arg-max of log p + g = scores + (log p - log q). If log p - log q is distributed like
    `spread` times Gumbel noise, this is the softmax of scores / spread; without noise and with spread 1 it is q.
    """
    return (scores / spread).log_softmax(-1)


def not_stopped(values: Float[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Return which candidates the policy has not stopped."""
    return values > STOPPED_BELOW


def size_of(pool: Pool, is_kept: Bool[Tensor, "b p"]) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Return the number and the depth of the kept nodes; one deeper if that is the last depth."""
    depth = torch.where(is_kept, pool.depths, 0).amax(1)
    return is_kept.sum(1), depth + (depth == pool.deepest)


def traits_of(layer: Layer) -> Float[Tensor, "b f k t"]:
    """Return the TRAITS of each candidate: logs in nats, depth and rank as counts, the rest from 0 to 1."""
    size = layer.match.shape
    match, log_q = (values.clamp(min=MIN_LOG) for values in (layer.match, layer.log_q))
    rank = torch.arange(size[2], device=match.device)
    cell = torch.stack([layer.places // layer.side, layer.places % layer.side], 1) / layer.side
    of_image = torch.cat([layer.near, cell], 1)[:, None, None].expand(*size[:2], size[2], 5)
    of_node = [
        layer.joint[..., None] + match,
        match,
        log_q,
        layer.entropy[..., None].expand(size),
        match - match[..., :1],
        torch.full_like(match, float(layer.depth + 1)),
        rank.expand(size).to(match.dtype),
    ]
    return torch.cat([torch.stack(of_node, -1), of_image], -1)


def padded_beam(beam: Float[Tensor, "b f"], width: int) -> Float[Tensor, "b w"]:
    """Return the best `width` log probabilities of a beam, padded with MIN_LOG."""
    best = beam.topk(min(width, beam.shape[1]), dim=1).values
    return torch.nn.functional.pad(best, (0, width - best.shape[1]), value=MIN_LOG)


def updated_map(seen: Float[Tensor, "b m"], step: Step, side: int, *, decay: float = 0.5) -> Float[Tensor, "b m"]:
    """Return the map after a step: a tested token gets the weighted mean of its neighbours and its own result.

    A token is tested if the node before it was visited and had children. Others get the mean of their neighbours.
    """
    assert step.tree is not None and step.verdict is not None
    nodes, last = step.verdict.walked, seen.shape[1] - 1
    ahead, length = torch.arange(nodes.shape[1], device=seen.device), step.verdict.length[:, None]
    places, is_visited = step.start[:, None] + ahead, ahead <= length
    has_children = step.tree.shape.has_children.expand(len(nodes), -1).gather(1, nodes)
    predicted = neighbours(seen, places, step.start, side).mean(-1)
    mixed = decay * predicted + (1 - decay) * (ahead < length).to(seen.dtype)
    updated = torch.where(is_visited & has_children, mixed, predicted)
    is_new = (places < last) & (ahead < step.counts[:, None])
    # Other entries are written to the last cell, which keeps the value PRIOR.
    return seen.scatter(1, torch.where(is_new, places, last), torch.where(is_new, updated, PRIOR))


def neighbours(
    seen: Float[Tensor, "b m"], places: Int[Tensor, "b n"], known: Int[Tensor, " b"], side: int
) -> Float[Tensor, "b n 3"]:
    """Return the acceptance at the left, upper and upper right neighbours; at the left the last known token."""
    none = seen.shape[1] - 1
    column = places % side
    left = torch.where(column > 0, torch.minimum(places, known[:, None]) - 1, none)
    above = torch.where(places >= side, places - side, none)
    right = torch.where((places >= side) & (column < side - 1), places - side + 1, none)
    cells = torch.stack([left, above, right], -1).clamp(0, none)
    return seen.gather(1, cells.flatten(1)).view(cells.shape)


@dataclass
class Eagle2(Policy):
    """EAGLE-2: the nodes in which the drafter has the highest confidence are verified (arXiv:2406.16858).

    The value of a node is the product of q along its path. With `value` "match" the product is of the probabilities
    to be the target's own sample, estimated from scores log q + noise. This is the confidence where tokens are sampled
    with the target's noise; without noise both give the same order.
    """

    value: Literal["q", "match"] = "q"
    sizes_vary: ClassVar[bool] = False

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log q of the candidates, or their log probability to match."""
        return layer.log_q if self.value == "q" else layer.match


@dataclass
class PredictableEagle2(Eagle2):
    """EAGLE-2 for rejection: the number of children of a node is chosen before they are sampled.

    Dropping sampled nodes by their own probability would bias the result. A parent's confidence is therefore the sum of
    squares of its distribution (the mean of q over its samples), assigned to the first child; the rest is divided by
    rank, by the rates of an average drafter.
    """

    is_predictable: ClassVar[bool] = True

    def begin(self, images: int, device: torch.device) -> None:
        """Keep the rates of the ranks."""
        self.held.rates = torch.tensor(RATES, dtype=torch.float32, device=device)

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return log probabilities by rank, from the parent's distribution alone."""
        sure = layer.collision[..., None]
        first, rates = pad(sure, (0, layer.width - 1)), pad(self.held.rates, (0, layer.width))[: layer.width]
        return (first + (1 - sure) * rates).log()


@dataclass
class Ddd(StoppingPolicy):
    """DDD, dynamic depth decoding: drafting stops when little probability is left in the beam (arXiv:2409.00142).

    The beam is EAGLE-2's, and the probability is that any of its paths matches the target: H = log sum exp of the
    beam's reach, checked from depth `check` on; below log `alive` an image drafts no deeper. The paper's sum of
    products of q is near 0 for flat distributions at any depth, so the products here are of the probabilities to be the
    target's own sample. ValueError for `alive` outside (0, 1) and `check` below 1.
    """

    alive: float = 0.2
    check: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alive < 1 or self.check < 1:
            raise ValueError(f"alive {self.alive}, check {self.check}: wanted a share between 0 and 1, a depth from 1")

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below a beam with little probability."""
        is_over = layer.reach.logsumexp(1) < math.log(self.alive)
        return (is_over & (layer.depth >= self.check))[:, None, None]

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the size of all nodes that are not stopped; one deeper only where the last beam is not stopped."""
        nodes, depth = super().preferred_size(pool)
        last = torch.where((pool.depths == pool.deepest) & not_stopped(pool.values), pool.values, -torch.inf)
        is_over = last.logsumexp(1) < math.log(self.alive)
        return nodes, torch.where(is_over, depth.clamp(max=pool.deepest), depth)


@dataclass
class Svip(StoppingPolicy):
    """SVIP: drafting stops where the drafter's distribution is too uncertain (arXiv:2411.18462).

    It drafts nothing below a node whose distribution has sqrt(c H(q)) above `threshold`, with H the entropy in nats. By
    Pinsker's inequality acceptance is at least 1 - sqrt(KL(p, q) / 2), and KL is estimated as a multiple of H(q). The
    constants for text (c 0.15, threshold 0.3) stop at 0.6 nats, below the entropy of most distributions of image
    tokens, so the threshold was refitted. The root is always extended: the paper (equation 7, algorithm 1) tests the
    distribution of the next token before it is drafted. With `keeps`, as in the released code, the distribution of the
    token just drafted is tested: the token stays, and drafting stops behind a depth without a certain node. ValueError
    unless both are positive.
    """

    c: float = 0.15
    threshold: float = 0.65
    keeps: bool = False

    def __post_init__(self) -> None:
        if self.c <= 0 or self.threshold <= 0:
            raise ValueError(f"c {self.c}, threshold {self.threshold}: wanted both above 0")

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below uncertain nodes; with `keeps` below a depth of such nodes."""
        is_over = (self.c * layer.entropy).sqrt() > self.threshold
        if self.keeps:
            before = self._is_over if layer.depth else torch.zeros_like(is_over[:, :1])
            self._is_over = before | is_over.all(1, keepdim=True)
            return before[..., None]
        return (is_over & (layer.depth > 0))[..., None]


@dataclass
class AdtTree(StoppingPolicy):
    """ADT-Tree: deep and narrow where the neighbours' drafts were accepted, shallow and wide elsewhere.

    It sets depth and width of a tree of constant size by the acceptance at the left, upper and upper right tokens. If
    these accepted the share a of their drafts, a path of depth d is accepted with probability a^d. The depth is where
    that falls to `end`, and the width is the budget divided by the depth:

        d = round(log(end) / log(a)),  k = budget / d

    Only decided tokens are read. ValueError for `end` outside (0, 1).
    """

    end: float = 0.1
    nodes: int = 15
    reads_traits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("end", self.end)

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is beyond the depth and width given by the neighbours."""
        # At the first depth all three are decided, so depth and width follow from the tree's first token.
        predicted = layer.near.mean(1).clamp(LEAST, MOST)
        depth = (math.log(self.end) / predicted.log()).round().clamp(min=1.0)
        width = (self.nodes / depth).ceil()
        rank = torch.arange(layer.width, device=predicted.device)
        return ((layer.depth >= depth)[:, None] | (rank >= width[:, None]))[:, None]


@dataclass
class AdtBisection(StoppingPolicy):
    """ADT-Tree that inherits depth d and width k from the tokens before, and moves both after each step by bisection.

    With a the share of the depth d that was accepted,

        a >= `rate`:  d = ceil((d + depth) / 2),  k = floor((k + 1) / 2)          deeper and narrower
        a <  `rate`:  d = floor((d + 1) / 2),     k = ceil((k + width) / 2)       shallower and wider

    Images start with d = `depth` / 2 and k = `width` / 2. Only decided tokens are read. ValueError for a rate outside
    (0, 1].
    """

    rate: float = 0.5
    depth: int = 10
    width: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}, wanted above 0, at most 1")

    def begin(self, images: int, device: torch.device) -> None:
        """Set depth and width of the first tree of each image."""
        self.held.depth, self.held.width = (
            torch.full((images,), -(-most // 2), device=device) for most in (self.depth, self.width)
        )

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is beyond depth and width; only the k best nodes are extended."""
        depth, width = self.held.depth, self.held.width
        rank = torch.arange(layer.width, device=depth.device)
        order = (layer.reach[:, None] > layer.reach[..., None]).sum(-1)
        is_out = (layer.depth >= depth)[:, None, None] | (rank >= width[:, None, None])
        return is_out | (order >= width[:, None])[..., None]

    def observe(self, step: Step) -> None:
        """Move depth and width; those of finished images do not matter."""
        assert step.verdict is not None
        depth, width = self.held.depth, self.held.width
        is_good = step.verdict.length >= self.rate * depth
        self.held.depth = torch.where(is_good, (depth + self.depth + 1) // 2, (depth + 1) // 2)
        self.held.width = torch.where(is_good, (width + 1) // 2, (width + self.width + 1) // 2)


@dataclass(frozen=True)
class C2TConfig:
    """Sizes of a classifier: `hidden` units over the traits of a node. `target` is its target's digest.

    ValueError for a value out of range and for an unknown trait.
    """

    hidden: int = 32
    traits: tuple[str, ...] = TRAITS
    kind: Literal["c2t"] = "c2t"
    target: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", tuple(self.traits))
        if unknown := [name for name in self.traits if name not in TRAITS]:
            raise ValueError(f"trait {unknown[0]!r} is unknown, wanted some of {', '.join(TRAITS)}")
        if not 1 <= self.hidden <= 1024 or not self.traits:
            raise ValueError(
                f"hidden is {self.hidden} over {len(self.traits)} traits, wanted 1 to 1024 over at least one"
            )


class C2T(nn.Module):
    """C2T, classifier-based tree construction: two layers that predict which drafted nodes are accepted.

    They map the traits of a node to the logit of its acceptance, given that its parent was reached. The paper
    (arXiv:2502.13652, equations 1 to 4) reads the joint probability of the path, the entropy of the parent's
    distribution and the depth, in 48 hidden units. Here there are 32 by default, and the node's rank among its siblings
    and the acceptance at the neighbours in the image are read as well.
    """

    scale: Tensor

    def __init__(self, config: C2TConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Linear(len(config.traits), config.hidden)
        self.second = nn.Linear(config.hidden, 1)
        self._columns = [TRAITS.index(name) for name in config.traits]
        scale = torch.tensor([SCALES.get(name, 1.0) for name in config.traits])
        self.register_buffer("scale", scale, persistent=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set Normal(0, 0.3) weights in the first layer, Normal(0, 0.1) in the second, zero biases."""
        for layer, width in ((self.first, 0.3), (self.second, 0.1)):
            layer.weight.data.normal_(0.0, width, generator=generator)
            layer.bias.data.zero_()

    def forward(self, traits: Float[Tensor, "*n t"]) -> Float[Tensor, "*n"]:
        """Return the logits of nodes with these traits, all of TRAITS."""
        own = torch.stack([traits[..., column] for column in self._columns], -1)
        weight = self.first.weight
        return self.second(torch.relu(self.first((own / self.scale).to(weight.dtype))))[..., 0].float()


@dataclass
class C2TPolicy(Policy):
    """Chooses nodes by the classifier's confidence along their path; those below `threshold` do not count in the size.

    Confidence is of a node given its parent, multiplied along the path, so it never rises with depth. Without `ranks`,
    as published (algorithm 1), a node's own confidence is compared with the threshold, and of each depth the best of
    those above it stay, as many as a layer is wide. ValueError for a threshold outside (0, 1).
    """

    part: C2T
    threshold: float = 0.03
    ranks: bool = True
    reads_traits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        """Return the classifier's log confidence in each candidate."""
        chances = nn.functional.logsigmoid(self.part(traits_of(layer)))
        if self.ranks:
            return chances
        is_open = not_stopped(layer.reach)[..., None] & (chances >= math.log(self.threshold))
        chances = chances.masked_fill(~is_open, -torch.inf)
        flat = chances.flatten(1)
        least = flat.topk(min(layer.width, flat.shape[1]), dim=1).values[:, -1, None, None]
        return chances.masked_fill(chances < least, -torch.inf)

    def preferred_size(self, pool: Pool) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """Return the size of the nodes above the threshold."""
        if not self.ranks:
            return super().preferred_size(pool)
        return size_of(pool, pool.values >= math.log(self.threshold))


Memory = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RadarConfig:
    """Sizes of the network, which reads the `beam` best log probabilities of a depth; `target` is a digest.

    ValueError for a value out of range.
    """

    beam: int = 8
    hidden: int = 64
    kind: Literal["radar"] = "radar"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam <= 64 or not 1 <= self.hidden <= 256:
            raise ValueError(f"beam {self.beam}, hidden {self.hidden}: wanted 1 to 64, and 1 to 256")


class Radar(nn.Module):
    """RADAR: an LSTM over the depths of one draft, and two layers that return the logit of another draft pass.

    It is trained by REINFORCE.
    """

    def __init__(self, config: RadarConfig) -> None:
        super().__init__()
        self.config = config
        width = config.beam + SIDE_INPUTS
        self.cell = nn.LSTMCell(width, config.hidden)
        self.first = nn.Linear(config.hidden + width, config.hidden)
        self.second = nn.Linear(config.hidden, 1)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set Normal(0, 0.1) weights, zero biases, and an output bias of 1 towards continuing."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "bias_" in name:
                parameter.data.zero_()
            else:
                parameter.data.normal_(0.0, 0.1, generator=generator)
        self.second.bias.data.fill_(1.0)

    def forward(
        self, beam: Float[Tensor, "b w"], side: Float[Tensor, "b 4"], memory: Memory | None = None
    ) -> tuple[Float[Tensor, " b"], Memory]:
        """Return the logit of drafting below a beam of log probabilities, and the new memory (before: None)."""
        seen = torch.cat([beam.clamp(min=MIN_LOG) / 10, side], 1).to(self.second.weight.dtype)
        hidden, kept = self.cell(seen, memory)
        continue_logit = self.second(torch.relu(self.first(torch.cat([hidden, seen], 1))))[:, 0]
        return continue_logit.float(), (hidden, kept)


def side_inputs(depth: int, near: Float[Tensor, "b 3"]) -> Float[Tensor, "b 4"]:
    """Return the network's inputs besides the beam."""
    return torch.cat([torch.full_like(near[:, :1], depth / 8), near], 1)


@dataclass
class RadarPolicy(StoppingPolicy):
    """EAGLE-2's tree by probabilities to match, as deep as the network continues; the first depth is always drafted.

    It stops where the probability of stopping is above `threshold`; only training samples the decision.
    ValueError for a threshold outside (0, 1).
    """

    part: Radar
    threshold: float = 0.5
    reads_traits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)

    def stops(self, layer: Layer) -> Bool[Tensor, "*b #f #k"]:
        """Return what is below a beam after which the network stopped."""
        if layer.depth == 0:
            self._memory, self._is_over = None, torch.zeros_like(layer.places, dtype=torch.bool)
        else:
            beam = padded_beam(layer.joint, self.part.config.beam)
            continue_logit, self._memory = self.part(beam, side_inputs(layer.depth, layer.near), self._memory)
            self._is_over = self._is_over | (torch.sigmoid(-continue_logit) > self.threshold)
        return self._is_over[:, None, None]
