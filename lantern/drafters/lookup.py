"""Drafters that look tokens up: SAM decoding copies places with a similar context (arXiv:2411.10666); repeats.

The paper copies what followed the longest suffix of a text that occurred before. Exact repeats are rare among tokens,
so contexts are also compared by super-tokens (k-means of the codebook) and on the grid:

    suffix   the tokens or super-tokens that end here, in the image's own past and, of super-tokens, in a corpus
    grid     the super-tokens at the left, above, upper left and upper right, and the tokens at the left and above

Nothing is trained by gradients: the add-on holds the super-tokens and a small corpus of images.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Noise
from lantern.core.types import Buffers, Drafter, DraftMode, DraftTree, Prompt, Step, Target, TreeShape
from lantern.drafters.base import check_width
from lantern.drafters.trees import StaticTree, TreeDrafter
from lantern.models.llamagen.transformer import check_grid, check_limits

FLOOR = 1e-4  # share of q that is spread evenly over all tokens
ROUNDS = 30  # of k-means
MAX_PICTURES = 1 << 16
FIELDS = ((0, -1), (-1, 0), (-1, -1), (-1, 1))  # (row, column) of the left, upper, upper left, upper right neighbour
SLOTS = 1 << 15  # of a hashed table of contexts
KEPT = 8  # tokens that a context of the corpus remembers
MOST_EXPONENT = 80.0  # of a weight: fp32 holds sums of e^80 over the places of an image


@dataclass(frozen=True)
class SamConfig:
    """Tokens of the model and of an image, super-tokens, images in the corpus, digest of the target that made them.

    ValueError for a value out of range.
    """

    vocab_size: int
    block_size: int
    groups: int
    pictures: int
    kind: Literal["sam"] = "sam"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.vocab_size:
            raise ValueError(f"groups is {self.groups}, wanted from 1 to {self.vocab_size}")
        check_limits(self, "vocab_size", "block_size")
        check_grid(self.block_size)
        if not 0 <= self.pictures <= MAX_PICTURES:
            raise ValueError(f"pictures is {self.pictures}, wanted from 0 to {MAX_PICTURES}")


class SamTables(nn.Module):
    """The super-token of each token, and the tokens of some images that the target made."""

    group_of: Tensor
    corpus: Tensor

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("group_of", torch.zeros(config.vocab_size, dtype=torch.int32))
        self.register_buffer("corpus", torch.zeros(config.pictures, config.block_size, dtype=torch.int32))

    @classmethod
    def of_tokens(
        cls, tokens: Int[Tensor, "p n"], codebook: Float[Tensor, "v d"], *, groups: int, target: str | None = None
    ) -> "SamTables":
        """Cluster the codebook and keep the images."""
        made = cls(SamConfig(len(codebook), tokens.shape[1], groups, len(tokens), target=target))
        made.group_of.copy_(super_tokens(codebook, groups))
        made.corpus.copy_(tokens)
        return made


def super_tokens(codebook: Float[Tensor, "v d"], groups: int, seed: int = 0) -> Int[Tensor, " v"]:
    """Return the cluster of each token by k-means; the centre of an empty cluster does not move."""
    generator = torch.Generator().manual_seed(seed)
    points = codebook.detach().double().cpu()
    centres = points[torch.randperm(len(points), generator=generator)[:groups]].clone()
    nearest = torch.zeros(len(points), dtype=torch.long)
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=groups)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return nearest


Found = tuple[Int[Tensor, "b f m"], Float[Tensor, "b f m"]]  # tokens with their weights


@dataclass(frozen=True)
class Context:
    """Context of the nodes of a depth: the token of each, and lengths of the suffix that matches before each place."""

    left: Int[Tensor, "b f"]
    depth: int
    lengths: Int[Tensor, "b f t n"] | None = None


@dataclass(frozen=True)
class Past:
    """The tokens of each image, of which the first `known` are committed."""

    tokens: Int[Tensor, "b n"]
    known: Int[Tensor, " b"]

    @property
    def places(self) -> Int[Tensor, " n"]:
        """The numbers of the tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    @property
    def is_known(self) -> Bool[Tensor, "b 1 n"]:
        """Which tokens are committed, for all nodes."""
        return (self.places < self.known[:, None])[:, None]

    def back(self, count: int) -> Int[Tensor, "b 1"]:
        """Return the last token, the one before it and so on; the first one where there are fewer."""
        return self.tokens.gather(1, (self.known - count).clamp(min=0)[:, None])


class Matcher:
    """Finds what followed contexts like those of the nodes of a tree: of the root, then depth by depth.

    Matchers run on the device, without the host.
    """

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        self._past = past
        return Context(past.back(1), 0)

    def extend(self, context: Context, parents: Int[Tensor, " f"], tokens: Int[Tensor, "b f"]) -> Context:
        """Return the context of nodes with these tokens below their parents."""
        return Context(tokens, context.depth + 1)

    def evidence(self, context: Context) -> list[Found]:
        """Return what was found in the image's own past and in the corpus."""
        raise NotImplementedError


class SuffixMatcher(Matcher):
    """Weights places by e^(sharp x length) of the suffix that matches before them, from `least` to `reach` symbols.

    With `is_super` it compares super-tokens, in the image's own past and, to the longest suffix that occurs there, in
    the corpus; tokens are compared in its own past only.
    """

    def __init__(self, tables: SamTables, *, is_super: bool, sharp: float, least: int, reach: int) -> None:
        own = torch.arange(tables.config.vocab_size, device=tables.corpus.device)
        self.symbol_of = tables.group_of.long() if is_super else own
        self.corpus, self.reach = tables.corpus.long()[: None if is_super else 0], reach
        lengths = torch.arange(reach + 1, device=own.device)
        self.weight_of = torch.where(lengths >= least, (sharp * lengths.float()).exp(), 0.0)  # by length of the suffix

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        self._past, count = past, past.tokens.shape[1]
        corpus = self.corpus.expand(len(past.tokens), -1, -1)
        texts = torch.cat([past.tokens[:, None], corpus], 1)  # of t images, the own one first
        self._before = torch.nn.functional.pad(self.symbol_of[texts], (self.reach, 0), value=-1)
        lengths = torch.full_like(texts, self.reach)
        for back in range(self.reach, 0, -1):  # up to the nearest symbol that differs
            last = self.symbol_of[past.back(back)].masked_fill(past.known[:, None] < back, -2)
            is_other = self._before[..., self.reach - back :][..., :count] != last[..., None]
            lengths = torch.where(is_other, back - 1, lengths)
        return Context(past.back(1), 0, lengths[:, None])

    def extend(self, context: Context, parents: Int[Tensor, " f"], tokens: Int[Tensor, "b f"]) -> Context:
        """Return the context of nodes with these tokens below their parents."""
        assert context.lengths is not None
        longer = torch.nn.functional.pad(context.lengths[:, parents, :, :-1] + 1, (1, 0)).clamp(max=self.reach)
        is_same = self._before[:, None, :, self.reach - 1 : -1] == self.symbol_of[tokens][..., None, None]
        return Context(tokens, context.depth + 1, torch.where(is_same, longer, 0))

    def evidence(self, context: Context) -> list[Found]:
        """Return what followed the matching places."""
        assert context.lengths is not None
        own, others = context.lengths[:, :, 0], context.lengths[:, :, 1:].flatten(2)
        weights = torch.where(self._past.is_known, self.weight_of[own], 0.0)
        found = [(self._past.tokens[:, None].expand_as(weights), weights)]
        if len(self.corpus):
            longest, place = others.max(-1, keepdim=True)
            found.append((self.corpus.flatten()[place], self.weight_of[longest]))
        return found


class GridMatcher(Matcher):
    """Weights places by e^(sharp x n), where n of six fields of the context agree and n is at least `least`.

    The fields are the super-tokens of the four neighbours, and the tokens of the left and the upper one.
    """

    def __init__(self, tables: SamTables, *, sharp: float, least: int) -> None:
        config, device = tables.config, tables.corpus.device
        self.sharp, self.least = sharp, least
        # One token past the codebook marks places outside the image and unknown places; it has its own super-token.
        self.outside = config.vocab_size
        self.group_of = torch.nn.functional.pad(tables.group_of.long(), (0, 1), value=config.groups)
        self.around = around(math.isqrt(config.block_size)).to(device)
        self.tables = [ContextTable(tables, fields) for fields in ((0, 1, 2, 3), (0, 1))] if config.pictures else []

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        tokens = torch.where(past.is_known[:, 0], past.tokens, self.outside)
        # Entry -1 is for places outside the image.
        self._tokens = torch.nn.functional.pad(tokens, (0, 1), value=self.outside)
        self._seen = fields_of(self._tokens[:, self.around], self.group_of)
        return super().root(past)

    def evidence(self, context: Context) -> list[Found]:
        """Return the tokens of similar contexts."""
        place = (self._past.known + context.depth).clamp(max=self._past.tokens.shape[1] - 1)
        near = self._tokens.gather(1, self.around[place] % self._tokens.shape[1])[:, None]
        near = near.expand(-1, context.left.shape[1], -1)
        # The left neighbour is the node's own token, except at the start of a row.
        is_begin = (self.around[place, 0] < 0)[:, None]
        left = torch.where(is_begin, near[..., 0], context.left)
        key = fields_of(torch.cat([left[..., None], near[..., 1:]], -1), self.group_of)
        agree = (self._seen[:, None] == key[:, :, None]).sum(-1)
        own = torch.where(self._past.is_known & (agree >= self.least), (self.sharp * agree.float()).exp(), 0.0)
        tokens = self._past.tokens[:, None].expand_as(own)
        return [(tokens, own), *(table.look_up(key, self.sharp) for table in self.tables)]


class ContextTable:
    """The most frequent tokens of a corpus by context, in a hash table; contexts that collide share a row."""

    def __init__(self, tables: SamTables, fields: tuple[int, ...]) -> None:
        config, device = tables.config, tables.corpus.device
        self.fields = torch.tensor(fields, device=device)
        self.scales = torch.tensor([(2 * config.groups + 1) ** i for i in range(len(fields))], device=device)
        outside = torch.nn.functional.pad(tables.corpus.long(), (0, 1), value=config.vocab_size)
        group_of = torch.nn.functional.pad(tables.group_of.long(), (0, 1), value=config.groups)
        near = outside[:, around(math.isqrt(config.block_size)).to(device)]
        slots = self._slots(fields_of(near, group_of)).flatten()
        self.tokens, self.counts = most_frequent(slots, tables.corpus.long().flatten(), config.vocab_size)

    def look_up(self, key: Int[Tensor, "b f 6"], sharp: float) -> Found:
        """Return tokens, and their counts times e^(sharp x the number of fields of this table)."""
        slots = self._slots(key)
        return self.tokens[slots], self.counts[slots] * math.exp(sharp * len(self.fields))

    def _slots(self, key: Int[Tensor, "*n 6"]) -> Int[Tensor, "*n"]:
        return (key[..., self.fields] * self.scales).sum(-1) % SLOTS


def around(grid: int) -> Int[Tensor, "n 4"]:
    """Return the places of each place's four neighbours, -1 for those outside the image."""
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    found = []
    for down, right in FIELDS:
        row, column = rows + down, columns + right
        is_inside = (row >= 0) & (column >= 0) & (column < grid)
        found.append(torch.where(is_inside, row * grid + column, -1).flatten())
    return torch.stack(found, 1)


def fields_of(near: Int[Tensor, "*n 4"], group_of: Int[Tensor, " v1"]) -> Int[Tensor, "*n 6"]:
    """Return the super-tokens of the four neighbours, and the tokens of the first two."""
    return torch.cat([group_of[near], near[..., :2]], -1)


def most_frequent(
    slots: Int[Tensor, " n"], tokens: Int[Tensor, " n"], vocab_size: int
) -> tuple[Int[Tensor, "slots kept"], Float[Tensor, "slots kept"]]:
    """Return the KEPT most frequent tokens of each slot with their counts, 0 where there are fewer."""
    pairs, counts = torch.unique(slots * vocab_size + tokens, return_counts=True)
    order = counts.sort(descending=True, stable=True).indices
    order = order[(pairs[order] // vocab_size).sort(stable=True).indices]
    pairs, counts = pairs[order], counts[order]
    slot = pairs // vocab_size
    first = torch.searchsorted(slot, slot)
    rank = torch.arange(len(slot), device=slot.device) - first
    is_kept: Bool[Tensor, " n"] = rank < KEPT
    found = torch.zeros(SLOTS, KEPT, dtype=torch.long, device=slot.device)
    weights = torch.zeros(SLOTS, KEPT, dtype=torch.float32, device=slot.device)
    found[slot[is_kept], rank[is_kept]] = pairs[is_kept] % vocab_size
    weights[slot[is_kept], rank[is_kept]] = counts[is_kept].float()
    return found, weights


def append(held: Buffers, step: Step) -> None:
    """Append the committed tokens of a step to the `known` ones of `tokens`."""
    steps = torch.arange(step.tokens.shape[1], device=step.tokens.device)
    held.tokens.scatter_(1, held.known[:, None] + steps, step.tokens)
    held.known.add_(step.counts)


class SamDrafter(TreeDrafter):
    """Grows a static tree from the tokens of similar contexts, with the target's noise.

    q is proportional to the weights that the matcher of kind `match` finds; a share `smooth` of it goes to all tokens
    of the same super-token. A step may also commit tokens of a tree `beside` its own. ValueError for `least` above
    `reach`, tables of another model, a tree wider than the codebook, and for weights beyond e^MOST_EXPONENT.
    """

    mode: DraftMode = "gumbel"
    records_log_q = False

    def __init__(
        self,
        tables: SamTables,
        target: Target,
        *,
        tree: StaticTree,
        match: str,
        sharp: float,
        least: int,
        reach: int,
        smooth: float,
        beside: StaticTree | None = None,
    ) -> None:
        if least < 1 or reach < least:
            raise ValueError(f"least is {least} and reach {reach}, wanted 1 <= least <= reach")
        config = tables.config
        got, expected = (config.vocab_size, config.block_size), (target.config.vocab_size, target.config.block_size)
        if got != expected:
            raise ValueError(
                f"the tables are of (vocab_size, block_size) {got}, the target of {expected}: make tables for it"
            )
        check_width(tree, config.vocab_size)
        reach = min(reach, config.block_size)
        longest = 6 if match == "grid" else reach  # the numbers of `fields_of`
        if sharp * longest > MOST_EXPONENT:
            what = f"matches of up to {longest} have the weight e^(sharp x length)"
            raise ValueError(f"sharp is {sharp:g}, wanted at most {MOST_EXPONENT / longest:g}: {what}")
        self.matcher: Matcher = GridMatcher(tables, sharp=sharp, least=least)
        if match != "grid":
            self.matcher = SuffixMatcher(tables, is_super=match == "super", sharp=sharp, least=least, reach=reach)
        self.tables, self.tree, self.held = tables, tree, Buffers()
        self.smooth, self.count, self.vocab_size = smooth, config.block_size, config.vocab_size
        self.room = self.count + max(tree.depth, 0 if beside is None else beside.depth) + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Reset the past and start from the first token."""
        super().begin(prompt, noise)
        device, images = prompt.mask.device, len(prompt.mask)
        self.held.group_of = self.tables.group_of.long().to(device)
        self.held.sizes = torch.bincount(self.held.group_of, minlength=self.tables.config.groups).float()
        self.held.tokens = torch.zeros(images, self.room, dtype=torch.long, device=device)
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)

    def observe(self, step: Step) -> None:
        """Append the committed tokens to the past."""
        append(self.held, step)

    def propose(self) -> DraftTree:
        """Grow the tree, with one search of the past per depth that has children."""
        context = self.matcher.root(Past(self.held.tokens[:, : self.count], self.held.known))
        ranked = [context.left]
        for depth, level in enumerate(self.levels):
            if depth > 0:
                context = self.matcher.extend(context, level.parents, ranked[-1][:, level.pairs])
            places = (self.held.known[:, None] + depth).clamp(max=self.count - 1)
            scores = self._log_q(self.matcher.evidence(context)) + self.noise.gumbel(places)
            ranked.append(scores.topk(level.width, dim=-1).indices.flatten(1))
        return self.drafted(ranked, [])

    def _log_q(self, found: list[Found]) -> Float[Tensor, "b f v"]:
        """Return log q of what was found."""
        weights = found[0][1]
        q = weights.new_zeros(*weights.shape[:2], self.vocab_size)
        for tokens, weights in found:
            q = q.scatter_add(-1, tokens, weights)
        q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        mass = q.new_zeros(*q.shape[:2], len(self.held.sizes)).scatter_add(-1, self.held.group_of.expand_as(q), q)
        similar = (mass / self.held.sizes.clamp(min=1.0))[..., self.held.group_of]
        return ((1 - self.smooth) * q + self.smooth * similar + FLOOR / self.vocab_size).log()


class RepeatDrafter(Drafter):
    """Drafts a chain of `length` tokens, each equal to its neighbour on the `side` "left" or "above".

    It is a baseline of what drafting gains without learning. Left of the first column is the end of the row above. The
    first row has none above it and repeats the left one. A neighbour that is itself a draft is followed to the token
    that it repeats.
    """

    mode: DraftMode = "point"
    records_log_q = False

    def __init__(self, target: Target, *, side: Literal["left", "above"], length: int) -> None:
        self.count = target.config.block_size
        self.distance = 1 if side == "left" else target.config.raster.columns
        self.depth = min(length, self.count)
        self.max_nodes = self.depth + 1
        self.held = Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Start from the first token."""
        images, device = len(prompt.mask), prompt.mask.device
        self.shape = TreeShape.chain(self.depth, device)
        self.held.ahead = torch.arange(self.depth, device=device)
        self.held.tokens = torch.zeros(images, self.count + self.max_nodes, dtype=torch.long, device=device)
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)

    def observe(self, step: Step) -> None:
        """Append the committed tokens."""
        append(self.held, step)

    def propose(self) -> DraftTree:
        """Repeat the last tokens, a row of them for "above"."""
        last = self.held.known[:, None] - 1
        beside = last + 1 - self.distance + self.held.ahead % self.distance
        places = torch.cat([last, torch.where(beside < 0, last, beside)], 1)
        return DraftTree(self.held.tokens.gather(1, places), self.shape, self.mode)
