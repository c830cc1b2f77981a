"""Noise as a pure function of (seed, image number, purpose, token number, token): Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). All arithmetic is on int64 tensors, so every
device, batch, shard and order gives the same bits, and there is no state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = 1 << 21  # numbers made at a time: bounds temporaries, about 30 bytes per number
CACHED = 1 << 17  # numbers made at a time by an engine's `make_uniforms`: so many stay in the processor's cache


class Purpose(IntEnum):
    """Purpose of a stream. Streams of different purposes have different keys and are never shared."""

    TARGET = 1  # the Gumbel noise by which plain decoding samples, shared with Gumbel drafting on purpose
    DRAFT = 2  # samples of a drafter
    TEST = 3  # uniforms of acceptance tests
    RESIDUAL = 4  # samples after a rejection, and bonus tokens of rejection verifiers


@dataclass(frozen=True)
class Key:
    """64-bit keys of Philox streams as two 32-bit words, in int64."""

    low: Int[Tensor, "..."]
    high: Int[Tensor, "..."]


def philox(counter: Sequence[Int[Tensor, "..."]], key: Key) -> list[Int[Tensor, "..."]]:
    """Map by Philox4x32-10 four 32-bit counter words (in int64, broadcast together) to four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key.low, key.high
    for _ in range(ROUNDS):
        # The product wraps into the sign bit; masking after the shift restores the unsigned high word.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (right >> 32 & MASK) ^ c1 ^ k0, (left >> 32 & MASK) ^ c3 ^ k1
        c1, c3 = right & MASK, left & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return [c0, c1, c2, c3]


def purpose_key(seeds: Int[Tensor, " b"], purpose: Purpose, iterations: Int[Tensor, " b"] | None = None) -> Key:
    """Return the keys of streams for one purpose, made from the seeds by Philox, so that no two are equal.

    Numbers that are made repeatedly for the same token have one stream per iteration. All others use iteration 0.
    """
    zeros = torch.zeros_like(seeds)
    iterations = zeros if iterations is None else iterations
    words = philox([zeros + int(purpose), iterations, zeros, zeros], Key(seeds & MASK, seeds >> 32))
    return Key(words[0], words[1])


def random_words(
    seeds: Int[Tensor, " b"],
    images: Int[Tensor, " b"],
    purpose: Purpose,
    positions: Int[Tensor, "*b n"],
    count: int,
    iterations: Int[Tensor, " b"] | None = None,
) -> Int[Tensor, "b n count"]:
    """Return the first `count` 32-bit words of each image's stream at each token number, shared or per image."""
    return words_of(purpose_key(seeds, purpose, iterations), images, positions, count)


def words_of(
    key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, "*b n"], count: int
) -> Int[Tensor, "b n count"]:
    """Return the words of `random_words` for the keys of images."""
    streams = Key(key.low[:, None, None], key.high[:, None, None])
    blocks = torch.arange(-(-count // 4), device=positions.device)[None, None]
    where, picture = positions.long()[..., None], images[:, None, None]
    words = philox([blocks, where, picture & MASK, picture >> 32], streams)
    return torch.stack(words, dim=-1).flatten(2)[..., :count]


def to_uniform(words: Int[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """Return (h + 1/2) 2^-32: never 0 and never 1, exact in fp64."""
    return (words.double() + 0.5) * 2.0**-32


def to_gumbel(uniforms: Float64[Tensor, "*n"], out: Float[Tensor, "*n"] | None = None) -> Float[Tensor, "*n"]:
    """Return -log(-log u), computed in fp64 and rounded to fp32, in `out` if it is given; overwrites `uniforms`."""
    noise = uniforms.log_().neg_().log_().neg_()
    return noise.float() if out is None else out.copy_(noise)


def random_uniforms(
    key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, " n"], out: Float64[Tensor, "b n count"]
) -> None:
    """Write the words of `words_of` to `out` as uniforms."""
    out.copy_(to_uniform(words_of(key, images, positions, out.shape[-1])))


class Noise:
    """The noise of a batch of images: one (seed, image number) each, whatever their place in the batch.

    Gumbel noise is a table `(b positions v)` per purpose, made at first use in blocks of positions. With `is_silent`
    (greedy decoding) Gumbel noise is 0 and no table is made. `make_uniforms` is a faster `random_uniforms` of the same
    numbers, of an engine for CPUs: then rows of the table are made when they are first read. ValueError for a key out
    of range.
    """

    def __init__(
        self,
        keys: Sequence[tuple[int, int]],
        *,
        positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        is_silent: bool = False,
        make_uniforms: Callable[..., None] | None = None,
    ) -> None:
        for name, values in zip(("seed", "image number"), zip(*keys, strict=True), strict=False):
            for value in values:
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
                    raise ValueError(f"{name} is {value}, wanted a whole number from 0 to 2**63 - 1")
        self.positions = positions
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_silent, self.make_uniforms = is_silent, make_uniforms or random_uniforms
        self._keys = torch.tensor(list(keys), dtype=torch.long, device=self.device).view(-1, 2)
        self._rows = torch.arange(len(self._keys), device=self.device)[:, None]
        self._gumbel: dict[int, Tensor] = {}
        self._missing: dict[int, set[int]] = {}  # rows that are not made yet
        self._uniform: dict[tuple[int, ...], Tensor] = {}

    def take_keys(self, other: "Noise") -> "Noise":
        """Become the noise of another one's keys, in the same memory; return the other if it has other sizes."""
        if other._keys.shape != self._keys.shape or other.is_silent != self.is_silent:
            return other
        self._keys.copy_(other._keys)
        for purpose in self._gumbel:
            self._make_rows(Purpose(purpose), range(self.positions))
        for name, table in self._uniform.items():
            table.copy_(self._uniforms(*name))
        return self

    @property
    def tables(self) -> list[Tensor]:
        """All tables that were made."""
        return [*self._gumbel.values(), *self._uniform.values()]

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = Purpose.TARGET) -> Float[Tensor, "b n v"]:
        """Return standard Gumbel noise of every token at these token numbers (clamped to the image)."""
        if self.is_silent:
            return torch.zeros(1, 1, 1, dtype=torch.float32, device=self.device).expand(
                *positions.shape, self.vocab_size
            )
        where = positions.clamp(0, self.positions - 1)
        is_lazy = self.make_uniforms is not random_uniforms
        return self._with_rows(purpose, where.flatten().tolist() if is_lazy else None)[self._rows, where]

    def gumbel_table(self, purpose: int = Purpose.TARGET) -> Float[Tensor, "b p v"] | None:
        """Return the noise of every token at every token number; None with `is_silent`."""
        return None if self.is_silent else self._with_rows(purpose, None)

    def streams(self, purpose: int) -> list[tuple[int, int, int]]:
        """Return the key of each image's numbers for a purpose, in two words, and the image's number."""
        seeds, images = self._keys.unbind(1)
        key = purpose_key(seeds, Purpose(purpose))
        return list(zip(key.low.tolist(), key.high.tolist(), images.tolist(), strict=True))

    def _with_rows(self, purpose: int, places: Sequence[int] | None) -> Float[Tensor, "b p v"]:
        """Return the table of a purpose, in which the rows of these token numbers (None: all) are made."""
        if purpose not in self._gumbel:
            shape = (len(self._keys), self.positions, self.vocab_size)
            self._gumbel[purpose] = torch.empty(*shape, dtype=torch.float32, device=self.device)
            self._missing[purpose] = set(range(self.positions))
        missing = self._missing[purpose]
        if missing and (rows := sorted(missing if places is None else missing.intersection(places))):
            self._make_rows(Purpose(purpose), rows)
            missing.difference_update(rows)
        return self._gumbel[purpose]

    def fresh(self, starts: Int[Tensor, " b"], rows: Int[Tensor, " n"]) -> Float[Tensor, "b n v"]:
        """Return Gumbel noise for the n samples of a drafter in the step that begins at each image's token `starts`.

        Unlike `gumbel` it differs between the steps and between the nodes of a token number: `rows` number the nodes.
        """
        if self.is_silent:
            return torch.zeros(1, 1, 1, dtype=torch.float32, device=self.device).expand(
                len(starts), len(rows), self.vocab_size
            )
        seeds, images = self._keys.unbind(1)
        return to_gumbel(to_uniform(random_words(seeds, images, Purpose.DRAFT, rows, self.vocab_size, starts + 1)))

    def uniform(
        self,
        positions: Int[Tensor, "b n"],
        lanes: int,
        *,
        purpose: int = Purpose.TEST,
        iterations: Int[Tensor, " b"] | None = None,
    ) -> Float64[Tensor, "b n lanes"]:
        """Return uniforms at these token numbers: lane r is for the r-th sibling tested there.

        `iterations` give other uniforms in every step, for tokens that are tested repeatedly. The iteration of an image
        is the number of its first undecided token, so that its n positions are all less than n ahead of it.
        """
        if iterations is not None:
            width = positions.shape[1]
            name = (purpose, lanes, width)
            if name not in self._uniform:
                self._uniform[name] = self._uniforms(*name)
            ahead = (positions - iterations[:, None]).clamp(0, width - 1)
            return self._uniform[name][self._rows, iterations.clamp(0, self.positions - 1)[:, None], ahead]
        return self.uniform_table(lanes, purpose)[self._rows, positions.clamp(0, self.positions - 1)]

    def uniform_table(self, lanes: int, purpose: int = Purpose.TEST) -> Float64[Tensor, "b p lanes"]:
        """Return the uniforms of every token number."""
        name = (purpose, lanes)
        if name not in self._uniform:
            self._uniform[name] = self._uniforms(*name).contiguous()
        return self._uniform[name]

    def _uniforms(self, purpose: int, lanes: int, width: int | None = None) -> Float64[Tensor, "b p ..."]:
        """Return uniforms of every token number, or of `width` tokens in the step that begins at each."""
        places = torch.arange(self.positions, device=self.device)
        if width is None:
            return to_uniform(random_words(self._keys[:, 0], self._keys[:, 1], Purpose(purpose), places, lanes))
        # row t is for tokens t .. t + width - 1 in the step that begins at token t
        iterations = places.repeat(len(self._keys))
        seeds, images = self._keys.repeat_interleave(self.positions, 0).unbind(1)
        ahead = torch.arange(width, device=self.device)
        table = torch.empty(len(iterations), width, lanes, dtype=torch.float64, device=self.device)
        rows = max(BLOCK // (width * max(lanes, 4)), 1)
        for first in range(0, len(iterations), rows):
            part = slice(first, first + rows)
            where = iterations[part, None] + ahead
            words = random_words(seeds[part], images[part], Purpose(purpose), where, lanes, iterations[part])
            table[part] = to_uniform(words)
        return table.unflatten(0, (len(self._keys), self.positions))

    def _make_rows(self, purpose: Purpose, places: Sequence[int]) -> None:
        """Write the rows of these token numbers to the table of a purpose."""
        table, is_whole = self._gumbel[purpose], len(places) == self.positions
        # Blocks of positions for large codebooks, of pictures for small ones.
        block = BLOCK if self.make_uniforms is random_uniforms else min(BLOCK, CACHED)
        size = len(places) * self.vocab_size
        pictures, rows = max(block // size, 1), min(max(block // self.vocab_size, 1), len(places))
        memory = table.new_empty(pictures * rows * self.vocab_size, dtype=torch.float64)
        for first in range(0, len(self._keys), pictures):
            seeds, images = self._keys[first : first + pictures].unbind(1)
            key = purpose_key(seeds, purpose)
            for start in range(0, len(places), rows):
                where = torch.tensor(places[start : start + rows], device=self.device)
                if is_whole:
                    part = table[first : first + pictures, start : start + rows]
                else:
                    part = table.new_empty(len(seeds), len(where), self.vocab_size)
                uniforms = memory[: part.numel()].view(part.shape)
                self.make_uniforms(key, images, where, uniforms)
                to_gumbel(uniforms, out=part)
                if not is_whole:
                    table[first : first + pictures, where] = part
