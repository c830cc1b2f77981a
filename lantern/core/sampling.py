"""From logits and noise to tokens: guidance, temperature, top-k and top-p, and the noise that samples are drawn with.

Plain decoding, drafters and verifiers share them. Noise is a pure function of (seed, image number, purpose, token
number, token): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). Its arithmetic is
on int64 tensors, so every device, batch, shard and order gives the same bits, and there is no state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.config import as_number, check_key, check_number

MAX_GUIDANCE = 1000.0
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
GUIDANCE, TEMPERATURE, TOP_K, TOP_P = range(4)  # columns of `Sampling.values`
SMALLEST_LOG, SMALLEST = -87.0, 1.7e-38  # just above exp(-87)
# Units of a mass of 1. Sums of whole units are exact in fp64: of the parts of one mass, in coarse units of 2^17 masses.
UNITS, COARSE = 2.0**48, 2.0**36
# of Philox4x32-10
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = 1 << 21  # numbers made at a time: bounds temporaries, about 30 bytes per number


@dataclass(frozen=True)
class Sampling:
    """Settings that map logits to a distribution: guidance, then temperature, top-k and top-p, in fp32.

    `guidance` s maps conditional c and unconditional u to u + s (c - u); at 1 or below only the conditional row is
    computed. `temperature` 0 is greedy: the arg-max has probability 1, the lowest index among equals. `top_k` 0 keeps
    all tokens, and tokens equal to the k-th are kept with it; `top_p` 1 keeps all. With `guidance_interval` k >= 0 only
    tokens 0 .. k + 1 are guided, as in LlamaGen. ValueError names the option that is out of range.
    """

    guidance: float | int = 3.0
    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    guidance_interval: int = -1

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, as_number(value))
        check_number("guidance", self.guidance, 0.0, MAX_GUIDANCE)
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}, wanted 0 (greedy) or at least {MIN_TEMPERATURE}")
        check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p is 0, wanted above 0 and at most 1 (1 keeps all tokens)")
        check_number("top_k", self.top_k, 0, kind=int)
        check_number("guidance_interval", self.guidance_interval, -1, kind=int)

    @property
    def rows(self) -> int:
        """Rows of the target per image: 2 with guidance, 1 without."""
        return 2 if self.guidance > 1 else 1

    @property
    def is_greedy(self) -> bool:
        """Whether every distribution is a single token."""
        return self.temperature == 0

    @property
    def needs_torch(self) -> bool:
        """Whether it has filters that compiled samplers leave to torch: all but temperature and top-k."""
        return self.top_p < 1

    @property
    def form(self) -> tuple[object, ...]:
        """What decides which operations run: settings but their values, of top-k the power of two that bounds it."""
        return self.rows, self.is_greedy, self.needs_torch, self.most_kept, self.guidance_interval

    @property
    def most_kept(self) -> int:
        """The power of two that bounds top-k, 0 without top-k."""
        return 1 << (self.top_k - 1).bit_length() if self.top_k else 0

    def has_top_k(self, tokens: int) -> bool:
        """Whether top-k may mask some of so many tokens."""
        return 0 < self.top_k < tokens and not self.is_greedy

    @property
    def settings(self) -> tuple[float, ...]:
        """The guidance scale, 1 without guidance, the temperature, 1 where greedy, top-k and top-p."""
        return self.guidance if self.rows == 2 else 1.0, self.temperature or 1.0, min(self.top_k, 1 << 24), self.top_p

    def values(self, images: int, device: torch.device) -> Float[Tensor, "b 4"]:
        """Return the `settings` of so many images."""
        return torch.tensor([self.settings], dtype=torch.float32, device=device).repeat(images, 1)

    def untruncated(self) -> "Sampling":
        """Return the same guidance at temperature 1 without filters, on which relaxed greedy decoding measures mass."""
        return dataclasses.replace(self, temperature=1.0, top_k=0, top_p=1.0)

    def scales(self, positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the guidance scale at each token number: `guidance`, or 1 outside the interval."""
        scale = self._value(GUIDANCE, positions.ndim) if self.rows == 2 else 1.0
        full = torch.ones(positions.shape, dtype=torch.float32, device=positions.device) * scale
        if self.guidance_interval < 0:
            return full
        return torch.where(positions <= self.guidance_interval + 1, full, 1.0)

    def guide(self, rows: Float[Tensor, "b r n c"], positions: Int[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        """Combine guidance rows to u + s (c - u) in fp32: rows of logits, or of the features that the head reads.

        The head is linear, so guided features have guided logits. ValueError for another number of rows.
        """
        if rows.shape[1] != self.rows:
            raise ValueError(f"got {rows.shape[1]} rows per image, wanted {self.rows} at guidance {self.guidance}")
        conditional = rows[:, 0].float()
        if self.rows == 1:
            return conditional
        unconditional = rows[:, 1].float()
        guided = unconditional + (conditional - unconditional) * self._value(GUIDANCE, conditional.ndim)
        if self.guidance_interval < 0:
            return guided
        return torch.where((positions <= self.guidance_interval + 1)[..., None], guided, conditional)

    def log_probs(
        self, logits: Float[Tensor, "b r n v"], positions: Int[Tensor, "b n"], may_look: bool = False
    ) -> Float[Tensor, "b n v"]:
        """Return log-probabilities at each token number in `positions`; with `may_look` the host may look at values."""
        return self.filtered(self.guide(logits, positions), may_look)

    def scores(
        self, logits: Float[Tensor, "b r n v"], positions: Int[Tensor, "b n"], may_look: bool = False
    ) -> Float[Tensor, "b n v"]:
        """Return `log_probs` up to a constant per token number, which is enough to sample by argmax(log p + g)."""
        return self._kept(self.guide(logits, positions), may_look)

    def filtered(self, guided: Float[Tensor, "*n v"], may_look: bool = False) -> Float[Tensor, "*n v"]:
        """Return log-probabilities of guided logits: temperature, top-k, top-p, log-softmax."""
        return self._kept(guided, may_look).log_softmax(-1)

    def _kept(self, guided: Float[Tensor, "*n v"], may_look: bool) -> Float[Tensor, "*n v"]:
        """Apply temperature, top-k and top-p."""
        logits = guided.float()
        if self.is_greedy:
            # the arg-max, the lowest index among equals, has log-probability 0
            return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
        if not self._is_one:
            logits = logits / self._value(TEMPERATURE, logits.ndim)
        if self.has_top_k(logits.shape[-1]):
            logits = self._largest(logits, may_look)
        if self.top_p < 1:
            logits = keep_nucleus(logits, self._value(TOP_P, logits.ndim))
        return logits

    @property
    def _is_one(self) -> bool:
        """Whether the temperature of all images is 1."""
        return self.temperature == 1

    def _value(self, column: int, ndim: int) -> Any:
        """Return a setting by its column in `values`, for tensors of so many axes, the first of images."""
        return (self.guidance, self.temperature, self.top_k, self.top_p)[column]

    def _largest(self, logits: Float[Tensor, "*n v"], may_look: bool) -> Float[Tensor, "*n v"]:
        return keep_largest(logits, self.top_k, may_look)


@dataclass(frozen=True)
class HeldSampling(Sampling):
    """A sampling whose values are read from a device, each image's own: captured rounds serve all of one `form`.

    `hold` gives the values.
    """

    memory: dict[str, Float[Tensor, "b 4"]] = field(default_factory=dict, compare=False, repr=False)

    def hold(self, values: Float[Tensor, "b 4"]) -> None:
        """Read from now on what this tensor has, as `values` of a sampling."""
        self.memory["values"] = values

    def untruncated(self) -> "Sampling":
        """Return the same guidance at temperature 1 without filters, of a greedy sampling only."""
        assert self.is_greedy
        return super().untruncated()

    def has_top_k(self, tokens: int) -> bool:
        """Whether top-k of this form may mask some of so many tokens."""
        return self.top_k > 0 and self.most_kept // 2 < tokens and not self.is_greedy

    @property
    def _is_one(self) -> bool:
        return False

    def _value(self, column: int, ndim: int) -> Any:
        return self.memory["values"][:, column].view(-1, *[1] * (ndim - 1))

    def _largest(self, logits: Float[Tensor, "*n v"], may_look: bool) -> Float[Tensor, "*n v"]:
        ordered = logits.topk(min(self.most_kept, logits.shape[-1])).values
        last = self._value(TOP_K, logits.ndim).long().clamp(max=ordered.shape[-1]) - 1
        least = ordered.gather(-1, last.expand(*logits.shape[:-1], 1))
        return logits.masked_fill(logits < least, -torch.inf)


def largest(values: Float[Tensor, "*n v"], may_look: bool = False) -> Int[Tensor, "*n"]:
    """Return the index of the largest value, the lowest among equals; with `may_look`, on a CPU, NumPy finds it."""
    if may_look and values.device.type == "cpu":  # PyTorch's `argmax` takes thirty times as long
        return torch.as_tensor(values.numpy().argmax(-1))
    return values.argmax(-1)


def keep_largest(logits: Float[Tensor, "*n v"], k: int, may_look: bool = False) -> Float[Tensor, "*n v"]:
    """Mask all tokens below the k-th largest logit; with `may_look`, on a CPU, the host selects it."""
    if may_look and logits.device.type == "cpu":
        # NumPy's vectorised selection takes about a tenth of the time of `topk`.
        values = logits.numpy()
        least = np.partition(values, -k, axis=-1)[..., -k, None]
        return torch.from_numpy(np.where(values < least, np.float32(-np.inf), values))
    least = logits.topk(k, sorted=False).values.amin(-1, keepdim=True)
    return logits.masked_fill(logits < least, -torch.inf)


def keep_nucleus(logits: Float[Tensor, "*n v"], top_p: float | Float[Tensor, "..."]) -> Float[Tensor, "*n v"]:
    """Mask all tokens after the first whose cumulative probability exceeds top_p (arXiv:1904.09751); it broadcasts."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0.0
    dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before > top_p)
    return logits.masked_fill(dropped, -torch.inf)


def logs(distribution: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """Return log p, with the logarithm of the smallest normal number (-87 in fp32) where p is 0.

    No token of such a probability wins an arg-max of log p + g. CPU libraries compute the logarithm of 0 much slower.
    """
    return distribution.clamp(min=torch.finfo(distribution.dtype).tiny).log()


def probabilities(log_p: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """Return exp(log p), with 0 for what fp32 cannot hold as a normal number.

    CPU libraries compute such exponentials, that of -inf among them, much slower.
    """
    return torch.threshold_(log_p.clamp(min=SMALLEST_LOG).exp_(), SMALLEST, 0.0)


def rounded_exp(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return e^x for x up to 0, computed in fp64 and rounded to the dtype of x.

    In fp32 it is the same on all processors but for the few numbers whose result lies halfway between two in fp32.
    """
    return x.double().exp().to(x.dtype)


def rounded_log(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return log x, computed in fp64 and rounded to the dtype of x."""
    return x.double().log().to(x.dtype)


def whole_units(mass: Float[Tensor, "*n"], units: float = UNITS) -> Float64[Tensor, "*n"]:
    """Return the whole units of a mass. Their sums are exact, so that they do not depend on an order."""
    return (mass.double() * units).floor_()


def rounded_log_softmax(scores: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
    """Return the log-softmax of scores; in fp32 its bits depend neither on a processor nor on an order of sums."""
    shifted = scores - scores.amax(-1, keepdim=True)
    total = whole_units(rounded_exp(shifted), COARSE).sum(-1, keepdim=True) / COARSE
    return shifted - rounded_log(total.to(scores.dtype))


def pick(distribution: Float[Tensor, "*n v"], uniforms: Float64[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Return the token at which the cumulative sum of a distribution exceeds u times its total; never one of mass 0.

    The distribution need not be normalised.
    """
    sums = distribution.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(sums, uniforms[..., None] * sums[..., -1:], right=True)[..., 0]
    # NaN gives an index past the last token, which on a GPU would abort the process without an error message.
    return found.clamp(max=distribution.shape[-1] - 1)


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
    """Return the keys of streams for one purpose, made from the seeds by Philox: two are equal by chance, 2^-64, only.

    Numbers that are made repeatedly for the same token have one stream per iteration. All others use iteration 0.
    """
    zeros = torch.zeros_like(seeds)
    iterations = zeros if iterations is None else iterations
    words = philox([zeros + int(purpose), iterations, zeros, zeros], Key(seeds & MASK, seeds >> 32))
    return Key(words[0], words[1])


def random_words(
    key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, "*b n"], count: int
) -> Int[Tensor, "b n count"]:
    """Return the first `count` 32-bit words of each image's stream at each token number, shared or per image."""
    streams = Key(key.low[:, None, None], key.high[:, None, None])
    blocks = torch.arange(-(-count // 4), device=positions.device)[None, None]
    where, picture = positions.long()[..., None], images[:, None, None]
    words = philox([blocks, where, picture & MASK, picture >> 32], streams)
    return torch.stack(words, dim=-1).flatten(2)[..., :count]


def to_uniform(words: Int[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """Return (h + 1/2) 2^-32: never 0 and never 1, exact in fp64."""
    return (words.double() + 0.5) * 2.0**-32


def to_gumbel(uniforms: Float64[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return -log(-log u), computed in fp64 and rounded to fp32; overwrites `uniforms`."""
    return uniforms.log_().neg_().log_().neg_().float()


def random_gumbel(
    key: Key, images: Int[Tensor, " b"], positions: Int[Tensor, " n"], table: Float[Tensor, "b p v"]
) -> None:
    """Write Gumbel noise of the words of `random_words` to the rows of a table at these token numbers."""
    for where in positions.split(max(BLOCK // table[:, 0].numel(), 1)):
        table[:, where] = to_gumbel(to_uniform(random_words(key, images, where, table.shape[-1])))


class Noise:
    """The noise of a batch of images: one (seed, image number) each, whatever their place in the batch.

    Gumbel noise is a table `(b positions v)` per purpose, made at first use in blocks of positions. With `is_silent`
    (greedy decoding) Gumbel noise is 0 and no table is made. `make_gumbel` is a faster `random_gumbel`, of an engine
    for CPUs: then rows of the table are made when they are first read. ValueError for a key out of range.
    """

    def __init__(
        self,
        keys: Sequence[tuple[int, int]],
        *,
        positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        is_silent: bool = False,
        make_gumbel: Callable[..., None] | None = None,
    ) -> None:
        for key in keys:
            check_key(*key)
        self.positions = positions
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_silent, self.make_gumbel = is_silent, make_gumbel or random_gumbel
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

    def copy_image(self, place: int, other: "Noise", of: int) -> None:
        """Take over the key of an image of another one, and its numbers in all tables that were made."""
        self._keys[place] = other._keys[of]
        for purpose, table in self._gumbel.items():
            table[place].copy_(other._with_rows(purpose, None)[of])
        for name, table in self._uniform.items():
            table[place].copy_((other._uniform[name] if name in other._uniform else other._uniforms(*name))[of])

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
        is_lazy = self.make_gumbel is not random_gumbel
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
        key = purpose_key(seeds, Purpose.DRAFT, starts + 1)
        return to_gumbel(to_uniform(random_words(key, images, rows, self.vocab_size)))

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
            ahead = (positions - iterations[:, None]).clamp(0, width - 1)
            first = iterations.clamp(0, self.positions - 1)[:, None]
            return self.step_table(lanes, width, purpose)[self._rows, first, ahead]
        return self.uniform_table(lanes, purpose)[self._rows, positions.clamp(0, self.positions - 1)]

    def step_table(self, lanes: int, width: int, purpose: int = Purpose.TEST) -> Float64[Tensor, "b p w lanes"]:
        """Return the uniforms of `width` tokens in the steps that begin at every token number."""
        name = (purpose, lanes, width)
        if name not in self._uniform:
            self._uniform[name] = self._uniforms(*name)
        return self._uniform[name]

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
            key = purpose_key(self._keys[:, 0], Purpose(purpose))
            return to_uniform(random_words(key, self._keys[:, 1], places, lanes))
        # row t is for tokens t .. t + width - 1 in the step that begins at token t
        iterations = places.repeat(len(self._keys))
        seeds, images = self._keys.repeat_interleave(self.positions, 0).unbind(1)
        ahead = torch.arange(width, device=self.device)
        table = torch.empty(len(iterations), width, lanes, dtype=torch.float64, device=self.device)
        rows = max(BLOCK // (width * max(lanes, 4)), 1)
        for first in range(0, len(iterations), rows):
            part = slice(first, first + rows)
            where = iterations[part, None] + ahead
            key = purpose_key(seeds[part], Purpose(purpose), iterations[part])
            table[part] = to_uniform(random_words(key, images[part], where, lanes))
        return table.unflatten(0, (len(self._keys), self.positions))

    def _make_rows(self, purpose: Purpose, places: Sequence[int]) -> None:
        """Write the rows of these token numbers to the table of a purpose."""
        seeds, images = self._keys.unbind(1)
        where = torch.tensor(places, device=self.device)
        self.make_gumbel(purpose_key(seeds, purpose), images, where, self._gumbel[purpose])
