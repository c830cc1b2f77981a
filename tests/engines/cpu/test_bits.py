"""Exactness in tokens, bit by bit: each token is chosen from the very logits that plain decoding computes for it.

Equal tokens alone would hide another rounding, which changes a token only where two are nearly equal.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.cpu.engine import CpuEngine
from lantern.generation.generator import Generator
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model
from tests.golden.adapter import TOY_NEIGHBOURS, WINDOW, WINDOWS, has_compiler, toy_folder

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
PROMISED = [name for name, method in METHODS.items() if method.promise == "tokens"]
OTHERS = [name for name in PROMISED if name not in ("plain", "auto")]
PROMPTS, KEYS = ["a red apple", "two cats"], [(3, 0), (3, 1)]  # of other lengths, and shorter than the model's slots


@cache
def model(dtype: str) -> Model:
    return load_model(str(toy_folder()), dtype=dtype, engine=CpuEngine())


@cache
def chosen_from(dtype: str, name: str) -> list[Tensor]:
    """Return for each image the logits of its tokens `(tokens, guidance rows, v)`."""
    settings: dict[str, Any] = {"window": WINDOW} if name in WINDOWS else {}
    settings |= {"k": TOY_NEIGHBOURS} if "k" in METHODS[name].settings else {}
    generator = Generator(model(dtype), METHODS[name].with_options(**settings), Sampling(guidance=3.0))
    found = [list[Tensor]() for _ in KEYS]

    def collect(step: Step) -> None:
        assert step.scores is not None
        logits = step.scores.logits
        for image, count in enumerate(step.counts.tolist()):
            path = [] if step.verdict is None else step.verdict.path[image].tolist()
            found[image] += [logits[image, :, node].clone() for node in [0, *path][:count]]

    text = generator.model.text
    assert text is not None
    condition = text.condition(PROMPTS, slots=generator.model.target.config.cls_token_num)
    generator.parts.generate(condition, keys=KEYS, callback=collect)
    return [torch.stack(one) for one in found]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_tokens_are_chosen_from_the_logits_of_plain_decoding(name: str, dtype: str) -> None:
    for mine, plain in zip(chosen_from(dtype, name), chosen_from(dtype, "plain"), strict=True):
        assert mine.shape == plain.shape
        assert torch.equal(mine, plain)
