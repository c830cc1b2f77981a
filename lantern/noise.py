"""Noise as a pure function of (seed, image number, purpose, code number, code): Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). All arithmetic is on int64 tensors, so every
device, batch, shard and order gives the same bits, and there is no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = 1 << 21  # numbers made at a time: bounds the temporaries, about 30 bytes a number


class Purpose(IntEnum):
    """What a stream is for. Streams of different purposes have different keys and are never shared."""

    TARGET = 1  # the Gumbel noise by which plain decoding draws, shared with Gumbel drafting on purpose
    DRAFT = 2  # a drafter's private draws
    TEST = 3  # uniforms of acceptance tests
    RESIDUAL = 4  # draws after a refusal, and bonus codes of classical verifiers
    POLICY = 5  # tree policies


@dataclass(frozen=True)
class Key:
    """The 64-bit key of a Philox stream, as two words."""

    low: int
    high: int


def philox(counter: Sequence[Int[Tensor, "*n"]], key: Key) -> list[Int[Tensor, "*n"]]:
    """Philox4x32-10: four 32-bit counter words (in int64, broadcast alike) to four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key.low, key.high
    for _ in range(ROUNDS):
        # The product wraps into the sign bit; masking after the shift restores the unsigned high word.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (right >> 32 & MASK) ^ c1 ^ k0, (left >> 32 & MASK) ^ c3 ^ k1
        c1, c3 = right & MASK, left & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return [c0, c1, c2, c3]


def purpose_key(seed: int, purpose: Purpose) -> Key:
    """The key of a seed's stream for one purpose: itself drawn by Philox from the seed, so that none coincide."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}, wanted a whole number from 0 to 2**63 - 1")
    words = philox([torch.tensor(word) for word in (int(purpose), 0, 0, 0)], Key(seed & MASK, seed >> 32))
    return Key(int(words[0]), int(words[1]))


def random_words(
    seed: int, image: int, purpose: Purpose, positions: Int[Tensor, " n"], count: int
) -> Int[Tensor, "n count"]:
    """The first `count` 32-bit words of the stream at each code number."""
    if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < 1 << 63:
        raise ValueError(f"image number is {image}, wanted a whole number from 0 to 2**63 - 1")
    block = torch.arange(-(-count // 4), device=positions.device)[None, :].expand(len(positions), -1)
    where = positions.long()[:, None].expand_as(block)
    low, high = torch.full_like(block, image & MASK), torch.full_like(block, image >> 32)
    words = philox([block, where, low, high], purpose_key(seed, purpose))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def to_uniform(words: Int[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """(h + 1/2) 2^-32: never 0 and never 1, exact in fp64."""
    return (words.double() + 0.5) * 2.0**-32


def to_gumbel(words: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """-log(-log u), computed in fp64 and rounded to fp32."""
    return to_uniform(words).log_().neg_().log_().neg_().float()


class Noise:
    """The noise of a batch of pictures: one (seed, image number) each, whatever their place in the batch.

    Gumbel rows are tables `(b positions v)`, made at first use and in blocks of positions. With `is_silent` (greedy
    decoding: the law is one code) Gumbel noise is 0 and costs nothing.
    """

    def __init__(
        self,
        keys: Sequence[tuple[int, int]],
        *,
        positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        is_silent: bool = False,
    ) -> None:
        self.keys = list(keys)
        self.positions = positions
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_silent = is_silent
        self._rows = torch.arange(len(self.keys), device=self.device)[:, None]
        self._gumbel: dict[int, Tensor] = {}
        self._uniform: dict[int, Tensor] = {}
        for seed, image in self.keys:  # refuse a bad seed here, not at first use
            random_words(seed, image, Purpose.TARGET, torch.zeros(1, dtype=torch.long), 1)

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = Purpose.TARGET) -> Float[Tensor, "b n v"]:
        """Standard Gumbel noise of every code at these code numbers (clamped to the picture)."""
        if self.is_silent:
            return torch.zeros(1, 1, 1, device=self.device).expand(*positions.shape, self.vocab_size)
        if purpose not in self._gumbel:
            tables = [self._gumbel_table(*key, Purpose(purpose)) for key in self.keys]
            self._gumbel[purpose] = torch.stack(tables)
        return self._gumbel[purpose][self._rows, positions.clamp(0, self.positions - 1)]

    def uniform(self, positions: Int[Tensor, "b n"], lanes: int) -> Float64[Tensor, "b n lanes"]:
        """Uniforms of acceptance tests: lane r is for the r-th sibling tested at that code number."""
        if lanes not in self._uniform:
            tables = [self._uniform_table(*key, lanes) for key in self.keys]
            self._uniform[lanes] = torch.stack(tables)
        return self._uniform[lanes][self._rows, positions.clamp(0, self.positions - 1)]

    def _gumbel_table(self, seed: int, image: int, purpose: Purpose) -> Float[Tensor, "p v"]:
        table = torch.empty(self.positions, self.vocab_size, device=self.device)
        rows = max(BLOCK // self.vocab_size, 1)
        for start in range(0, self.positions, rows):
            where = torch.arange(start, min(start + rows, self.positions), device=self.device)
            table[where] = to_gumbel(random_words(seed, image, purpose, where, self.vocab_size))
        return table

    def _uniform_table(self, seed: int, image: int, lanes: int) -> Float64[Tensor, "p lanes"]:
        where = torch.arange(self.positions, device=self.device)
        return to_uniform(random_words(seed, image, Purpose.TEST, where, lanes))
