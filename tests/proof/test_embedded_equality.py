"""The first rows of the embedded model by every method that promises the tokens of plain decoding, token for token."""

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.generation.generator import Generator
from lantern.generation.requests import Request
from lantern.methods import METHODS, Method
from lantern.models.folder import Model, load_model
from tests.threads import one_thread

REQUESTED = [Request(prompt=prompt, seed=7) for prompt in ("a red apple", "a fox")]
# A row of the grid. tests/test_embedded.py compares whole pictures.
TOKENS = 16
EXACT = [name for name, method in METHODS.items() if method.is_identical and name != "auto"]


class Enough(Exception):
    """All images have the tokens to compare."""


class FirstTokens:
    """Collects the first tokens of each image and then stops the generation."""

    def __init__(self, images: int) -> None:
        self.tokens = torch.full((images, 256), -1)

    def __call__(self, step: Step) -> None:
        for image, (start, count) in enumerate(zip(step.start.tolist(), step.counts.tolist(), strict=True)):
            if start < TOKENS:
                self.tokens[image, start : start + count] = step.tokens[image, :count]
        if bool((self.tokens[:, :TOKENS] >= 0).all()):
            raise Enough


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with one_thread():
        yield load_model(device="cpu", dtype="fp32", parts=("text", "drafter"))


def first_tokens(model: Model, method: Method, guidance: float, batch: int) -> Int[Tensor, "b n"]:
    decoder, made = Generator(model, method, Sampling(guidance=guidance)), list[Tensor]()
    for start in range(0, len(REQUESTED), batch):
        requested = REQUESTED[start : start + batch]
        found = FirstTokens(len(requested))
        with pytest.raises(Enough):
            decoder.decode(decoder.condition(requested), requested, found)
        made.append(found.tokens[:, :TOKENS])
    return torch.cat(made)


CATALOGUE = [name for name in EXACT if not name.endswith("-paper")]
SLOW = [pytest.param(guidance, EXACT, marks=pytest.mark.slow) for guidance in (1.0, 3.0, 7.5)]


@pytest.mark.parametrize(("guidance", "names"), [(3.0, CATALOGUE), *SLOW])
def test_exact_methods_in_a_batch_equal_plain_decoding_alone(model: Model, guidance: float, names: list[str]) -> None:
    expected = first_tokens(model, METHODS["plain"], guidance, 1)
    for name in names:
        assert torch.equal(first_tokens(model, METHODS[name], guidance, 2), expected), name
