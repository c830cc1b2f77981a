"""Exactness in tokens, bit by bit: each token is chosen from the very logits that plain decoding computes for it.

Equal tokens alone would hide another rounding, which changes a token only where two are nearly equal.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.config import Weights
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.cpu.engine import CpuEngine
from lantern.generation.generator import Generator
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model
from tests.golden.adapter import TOY_NEIGHBOURS, WINDOW, WINDOWS, toy_folder
from tests.tiny_decoder import chosen_from

PROMISED = [name for name, method in METHODS.items() if method.promise == "tokens"]
OTHERS = [name for name in PROMISED if name not in ("plain", "auto")]
PROMPTS, KEYS = ["a red apple", "two cats"], [(3, 0), (3, 1)]  # of other lengths, and shorter than the model's slots


@cache
def model(dtype: str, weights: Weights) -> Model:
    return load_model(str(toy_folder()), dtype=dtype, engine=CpuEngine(weights=weights))


@cache
def logits_of(name: str, *of: Any) -> list[Tensor]:
    """Return for each image the logits of its tokens `(tokens, guidance rows, v)`."""
    settings: dict[str, Any] = {"window": WINDOW} if name in WINDOWS else {}
    settings |= {"k": TOY_NEIGHBOURS} if "k" in METHODS[name].settings else {}
    generator = Generator(model(*of), METHODS[name].with_options(**settings), Sampling(guidance=3.0))
    found = [list[Tensor]() for _ in KEYS]

    def collect(step: Step) -> None:
        for image, logits in enumerate(found):
            logits += chosen_from(step, image)

    text = generator.model.text
    condition = text.condition(PROMPTS, slots=generator.model.target.config.cls_token_num)
    generator.parts.generate(condition, keys=KEYS, callback=collect)
    return [torch.stack(one) for one in found]


# Each method has both dtypes and both kinds of weights, a pair of them in the default run; the next one has the others.
KINDS = [("fp32", "full"), ("bf16", "int8"), ("fp32", "int8"), ("bf16", "full")]
CASES = [
    pytest.param(name, *KINDS[number], marks=[pytest.mark.slow] * is_second)
    for i, name in enumerate(OTHERS)
    for is_second, number in enumerate((i % 4, (i + 1) % 2 + i % 4 // 2 * 2))
]


@pytest.mark.parametrize(("name", "dtype", "weights"), CASES)
def test_tokens_are_chosen_from_the_logits_of_plain_decoding(name: str, dtype: str, weights: Weights) -> None:
    for mine, plain in zip(logits_of(name, dtype, weights), logits_of("plain", dtype, weights), strict=True):
        assert mine.shape == plain.shape
        assert torch.equal(mine, plain)
