"""A target so small that the distribution of whole images is enumerated: four tokens out of five."""

import itertools
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation
from lantern.generation.generator import Decoder
from lantern.models.llamagen.transformer import Transformer
from tests.proof import draws
from tests.tiny import tiny_condition, tiny_target, uncached

PICTURES = 5000  # find each fault that moves 9 % of the probability with a chance of 99 %
SMALL = tiny_target(block_size=4, vocab_size=5)
DISTRIBUTION = Sampling(guidance=2)


def teacher_forced(target: Transformer, condition: Condition, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return log p of every token given those before it, without a cache."""
    logits = uncached(target, condition, tokens[:, :-1], rows=sampling.rows)[:, :, -tokens.shape[1] :]
    return sampling.log_probs(logits, torch.arange(tokens.shape[1]).expand(len(tokens), -1))


@lru_cache(maxsize=4)
@torch.no_grad()
def enumerated(forced: tuple[int, ...] = (-1, -1, -1, -1)) -> Tensor:
    """Return the probabilities of all 625 images, where the tokens are sampled that are not forced (-1)."""
    tokens = torch.tensor(list(itertools.product(range(5), repeat=4)))
    distributions = teacher_forced(SMALL, tiny_condition((3,)).select([0] * len(tokens)), tokens, DISTRIBUTION)
    is_free = torch.tensor(forced) < 0
    is_possible = (is_free | (tokens == torch.tensor(forced))).all(1)
    sampled = distributions.gather(-1, tokens[..., None])[..., 0].masked_fill(~is_free, 0.0)
    return sampled.sum(1).double().exp() * is_possible


def pictures(decoder: Decoder, count: int, seed: int = 0, **how: Any) -> Generation:
    """Make images of one caption, each with its own noise."""
    keys = [(seed, i) for i in range(count)]
    return decoder.generate(tiny_condition((3,)).select([0] * count), keys=keys, **how)


def p_value(tokens: Tensor, forced: tuple[int, ...] = (-1, -1, -1, -1)) -> float:
    """Return the p-value of a chi-square test of images against the enumerated distribution."""
    return draws.p_value(counted(tokens), enumerated(forced) * len(tokens))


def counted(tokens: Tensor) -> Tensor:
    """Return how often each of the 625 images occurs."""
    return torch.bincount((tokens * torch.tensor([125, 25, 5, 1])).sum(1), minlength=625).double()


def distance(tokens: Tensor) -> tuple[float, float]:
    """Return the distance between these images and the enumerated distribution, and what chance makes of it."""
    exact, got = enumerated(), counted(tokens) / len(tokens)
    chance = (exact * (1 - exact) * 2 / (math.pi * len(tokens))).sqrt().sum() / 2
    return float((got - exact).abs().sum() / 2), float(chance)
