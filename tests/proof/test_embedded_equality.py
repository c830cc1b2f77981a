"""The embedded model by every method that promises plain decoding's pictures: the first rows, code for code."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from lantern.catalog import METHODS, Method
from lantern.eval.equality import promising
from lantern.generate import Decoder
from lantern.model_folder import Model, load_model
from lantern.requests import Request
from lantern.sampling import Sampling
from lantern.types import Step

ASKED = [Request(prompt=prompt, seed=seed) for seed in (0, 7) for prompt in ("a red apple", "a fox")]
CODES = 32  # two rows of the grid; whole pictures are compared in tests/test_embedded.py and by lantern.eval.equality


class Enough(Exception):
    """All images have the codes that are compared."""


class FirstCodes:
    """Collects the first codes of each image and then stops the generation."""

    def __init__(self, images: int) -> None:
        self.codes = torch.full((images, 2 * CODES), -1)

    def __call__(self, step: Step) -> None:
        for image, (start, count) in enumerate(zip(step.start.tolist(), step.counts.tolist(), strict=True)):
            if start < CODES:
                self.codes[image, start : start + count] = step.codes[image, :count]
        if bool((self.codes[:, :CODES] >= 0).all()):
            raise Enough


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(device="cpu", dtype="fp32", parts=("text", "drafter"))
    torch.set_num_threads(threads)


def first_codes(
    model: Model, method: Method, guidance: float, batch: int, asked_for: Sequence[Request] = ASKED
) -> Int[Tensor, "b n"]:
    decoder, made = Decoder(model, method, Sampling(guidance=guidance)), list[Tensor]()
    for start in range(0, len(asked_for), batch):
        asked = asked_for[start : start + batch]
        found = FirstCodes(len(asked))
        with pytest.raises(Enough):
            decoder.decode(decoder.condition(asked), asked, found)
        made.append(found.codes[:, :CODES])
    return torch.cat(made)


@pytest.mark.parametrize("guidance", [1.0, 3.0, 7.5])
def test_exact_gumbel_methods_give_plain_decodings_codes_alone_and_in_batches(model: Model, guidance: float) -> None:
    expected = first_codes(model, METHODS["plain"], guidance, len(ASKED))
    for name in promising(model):
        made = first_codes(model, METHODS[name], guidance, 3)
        assert torch.equal(made, expected), f"{name} in batches of 3 and 1"
        made = first_codes(model, METHODS[name], guidance, 1, ASKED[:2])
        assert torch.equal(made, expected[:2]), f"{name} one by one"
