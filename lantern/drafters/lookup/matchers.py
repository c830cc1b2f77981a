"""Matchers of SAM decoding: they find earlier places whose context is like that of a draft node.

One matcher compares suffixes of the token sequence, the other compares neighbourhoods on the grid. Both run on the
device, without the host.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import Buffers
from lantern.drafters.lookup.suffix_automaton import WalkTable
from lantern.drafters.lookup.tables import SamTables

FIELDS = ((0, -1), (-1, 0), (-1, -1), (-1, 1))  # (row, column) of the left, upper, upper left, upper right neighbour
SLOTS = 1 << 15  # of a hashed table of contexts
KEPT = 8  # tokens that a context of the corpus remembers


Found = tuple[Int[Tensor, "b f m"], Float[Tensor, "b f m"]]  # tokens of the corpus with their weights


@dataclass(frozen=True)
class Context:
    """Context of the nodes of a depth: length of the matching suffix before each place, state of the automaton."""

    left: Int[Tensor, "b f"]
    depth: int
    lengths: Int[Tensor, "b f n"] | None = None
    state: Int[Tensor, "b f"] | None = None
    matched: Int[Tensor, "b f"] | None = None


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
    """Finds what followed contexts like those of the nodes of a tree: of the root, then depth by depth."""

    def begin(self, images: int, device: torch.device) -> None:
        """Begin a generation."""

    def read(self, tokens: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        """Read the tokens that a step committed."""

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        self._past = past
        return Context(past.back(1), 0)

    def extend(self, context: Context, parents: Int[Tensor, " f"], tokens: Int[Tensor, "b f"]) -> Context:
        """Return the context of nodes with these tokens below their parents."""
        return Context(tokens, context.depth + 1)

    def evidence(self, context: Context) -> tuple[Float[Tensor, "b f n"], list[Found]]:
        """Return the weight of each of the image's own places, and what was found in the corpus."""
        raise NotImplementedError


class SuffixMatcher(Matcher):
    """Weights places by e^(sharp x length) of the suffix that matches before them, from `least` to `reach` symbols.

    With `is_super` it compares super-tokens and also walks the corpus's automaton. Tokens are compared in the image's
    own past only, because a look-up table of an automaton over thousands of tokens is too large.
    """

    def __init__(self, tables: SamTables, *, is_super: bool, sharp: float, least: int, reach: int) -> None:
        self.sharp, self.least, self.reach, self.held = sharp, least, reach, Buffers()
        config, device = tables.config, tables.corpus.device
        own = torch.arange(config.vocab_size, device=device)
        self.symbol_of = tables.group_of.long() if is_super else own
        self.table: WalkTable | None = None
        if is_super and config.pictures:
            groups = tables.group_of.long()[tables.corpus.long()]
            # A symbol that does not occur elsewhere separates the pictures.
            parted = torch.nn.functional.pad(groups, (0, 1), value=config.groups).flatten()
            self.table = WalkTable.of(parted.tolist(), config.groups, device)
            self.follows = torch.nn.functional.pad(tables.corpus.long(), (0, 1), value=-1).flatten()

    def begin(self, images: int, device: torch.device) -> None:
        """Reset the state of the automaton."""
        self.held.state = torch.zeros(images, dtype=torch.long, device=device)
        self.held.matched = torch.zeros_like(self.held.state)

    def read(self, tokens: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        """Advance the automaton by the committed tokens."""
        if self.table is None:
            return
        for j, symbols in enumerate(self.symbol_of[tokens].unbind(1)):
            state, matched = self.table.step(self.held.state, self.held.matched, symbols)
            self.held.state = torch.where(j < counts, state, self.held.state)
            self.held.matched = torch.where(j < counts, matched, self.held.matched)

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        self._past, self._symbols, lengths = past, self.symbol_of[past.tokens], torch.zeros_like(past.tokens)
        runs = torch.ones_like(lengths, dtype=torch.bool)
        for back in range(1, self.reach + 1):
            runs = runs & (self._symbols.roll(back, 1) == self.symbol_of[past.back(back)])
            runs = runs & (past.places >= back) & (past.known >= back)[:, None]
            lengths = lengths + runs.long()
        return Context(past.back(1), 0, lengths[:, None], self.held.state[:, None], self.held.matched[:, None])

    def extend(self, context: Context, parents: Int[Tensor, " f"], tokens: Int[Tensor, "b f"]) -> Context:
        """Return the context of nodes with these tokens below their parents."""
        assert context.lengths is not None and context.state is not None and context.matched is not None
        symbols = self.symbol_of[tokens]
        before = torch.nn.functional.pad(self._symbols[:, :-1], (1, 0), value=-1)
        longer = torch.nn.functional.pad(context.lengths[:, parents, :-1], (1, 0)) + 1
        lengths = torch.where(before[:, None] == symbols[..., None], longer.clamp(max=self.reach), 0)
        state, matched = context.state[:, parents], context.matched[:, parents]
        if self.table is not None:
            state, matched = self.table.step(state, matched, symbols)
        return Context(tokens, context.depth + 1, lengths, state, matched)

    def evidence(self, context: Context) -> tuple[Float[Tensor, "b f n"], list[Found]]:
        """Return what followed the matching places."""
        assert context.lengths is not None and context.state is not None and context.matched is not None
        is_past = self._past.is_known & (context.lengths >= self.least)
        past = torch.where(is_past, (self.sharp * context.lengths.float()).exp(), 0.0)
        if self.table is None:
            return past, []
        ends = self.table.ends[context.state].long()
        tokens = self.follows[(ends + 1).clamp(max=len(self.follows) - 1)]
        matched = context.matched.clamp(max=self.reach)
        is_good = (matched >= self.least) & (tokens >= 0)
        weights = torch.where(is_good, (self.sharp * matched.float()).exp(), 0.0)
        return past, [(tokens.clamp(min=0)[..., None], weights[..., None])]


class GridMatcher(Matcher):
    """Weights places by e^(sharp x n), where n of six fields of the context agree and n is at least `least`.

    The fields are the super-tokens of the four neighbours, and the tokens of the left and the upper one.
    """

    def __init__(self, tables: SamTables, *, sharp: float, least: int) -> None:
        config, device = tables.config, tables.corpus.device
        self.sharp, self.least, self.groups = sharp, least, config.groups
        # One token past the codebook marks places outside the picture and unknown places; it has its own super-token.
        self.outside = config.vocab_size
        self.group_of = torch.nn.functional.pad(tables.group_of.long(), (0, 1), value=config.groups)
        self.around = around(math.isqrt(config.block_size)).to(device)
        self.tables = [ContextTable(tables, fields) for fields in ((0, 1, 2, 3), (0, 1))] if config.pictures else []

    def root(self, past: Past) -> Context:
        """Return the context of the last committed token."""
        tokens = torch.where(past.is_known[:, 0], past.tokens, self.outside)
        # Entry -1 is for places outside the picture.
        self._tokens = torch.nn.functional.pad(tokens, (0, 1), value=self.outside)
        self._seen = fields_of(self._tokens[:, self.around], self.group_of)
        return super().root(past)

    def evidence(self, context: Context) -> tuple[Float[Tensor, "b f n"], list[Found]]:
        """Return the tokens of similar contexts."""
        place = (self._past.known + context.depth).clamp(max=self._past.tokens.shape[1] - 1)
        near = self._tokens.gather(1, self.around[place] % self._tokens.shape[1])[:, None]
        near = near.expand(-1, context.left.shape[1], -1)
        # The left neighbour is the node's own token, except at the start of a row.
        is_begin = (self.around[place, 0] < 0)[:, None]
        left = torch.where(is_begin, near[..., 0], context.left)
        key = fields_of(torch.cat([left[..., None], near[..., 1:]], -1), self.group_of)
        agree = (self._seen[:, None] == key[:, :, None]).sum(-1)
        past = torch.where(self._past.is_known & (agree >= self.least), (self.sharp * agree.float()).exp(), 0.0)
        return past, [table.look_up(key, self.sharp) for table in self.tables]


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
