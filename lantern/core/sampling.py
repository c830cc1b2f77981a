"""Logits to probabilities: guidance, temperature, top-k and top-p, for plain decoding, drafters and verifiers."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.config import as_number, check_number

MAX_GUIDANCE = 1000.0
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
SMALLEST_LOG, SMALLEST = -87.0, 1.7e-38  # just above exp(-87)
# Units of a mass of 1. Sums of whole units are exact in fp64: of the parts of one mass, in coarse units of 2^17 masses.
UNITS, COARSE = 2.0**48, 2.0**36


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

    def untruncated(self) -> "Sampling":
        """Return the same guidance at temperature 1 without filters, on which relaxed greedy decoding measures mass."""
        return dataclasses.replace(self, temperature=1.0, top_k=0, top_p=1.0)

    def scales(self, positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the guidance scale at each token number: `guidance`, or 1 outside the interval."""
        scale = float(self.guidance) if self.rows == 2 else 1.0
        full = torch.full(positions.shape, scale, dtype=torch.float32, device=positions.device)
        if self.guidance_interval < 0:
            return full
        return torch.where(positions <= self.guidance_interval + 1, full, torch.ones_like(full))

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
        if self.guidance_interval < 0:
            return unconditional + (conditional - unconditional) * self.guidance
        guided = unconditional + (conditional - unconditional) * self.guidance
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
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = keep_largest(logits, self.top_k, may_look)
        if self.top_p < 1:
            logits = keep_nucleus(logits, self.top_p)
        return logits


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


def keep_nucleus(logits: Float[Tensor, "*n v"], top_p: float) -> Float[Tensor, "*n v"]:
    """Mask all tokens after the first whose cumulative probability exceeds top_p (arXiv:1904.09751)."""
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
