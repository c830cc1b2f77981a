"""The embedded model: its size, and equal tokens of exact methods."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lantern.core.config import embedded_model
from lantern.core.io import read_checksums
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.cpu.engine import CpuEngine
from lantern.generation.generator import Generator, generate
from lantern.generation.requests import Request
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.text import read_words
from tests.tiny import one_thread

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with one_thread():
        yield load_model(device="cpu")


def test_the_model_is_small_and_lists_its_weights_and_the_words_of_its_captions() -> None:
    files = [path for path in embedded_model().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 56 * MEBIBYTE
    assert not [path for path in files if path.suffix in (".pt", ".bin", ".ckpt", ".pkl")]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert weights and all(path.name in read_checksums(path.parent) for path in weights)
    words = read_words(embedded_model())
    assert {"apple", "cat", "3d", "purple"} <= set(words) and "kitty" not in words
    assert words == sorted(set(words))


EXACT = [name for name, method in METHODS.items() if method.is_identical and name != "auto"]
CATALOGUE = [name for name in EXACT if not name.endswith("-paper")]
SLOW = [pytest.param(guidance, EXACT, marks=pytest.mark.slow) for guidance in (1.0, 3.0, 7.5)]
FEW = 16  # tokens, a row of the grid


class Enough(Exception): ...


def first_tokens(model: Model, method: str, guidance: float, batch: int) -> Tensor:
    """Return the first tokens of two images; the generation is stopped when both have them."""
    requested = [Request(prompt=prompt, seed=7) for prompt in ("a red apple", "a fox")]
    generator, made = Generator(model, METHODS[method], Sampling(guidance=guidance)), torch.full((2, 256), -1)

    def collect(step: Step) -> None:
        for image, (start, count) in enumerate(zip(step.start.tolist(), step.counts.tolist(), strict=True)):
            if start < FEW:
                made[first + image, start : start + count] = step.tokens[image, :count]
        if bool((made[first : first + batch, :FEW] >= 0).all()):
            raise Enough

    for first in range(0, 2, batch):
        some = requested[first : first + batch]
        with pytest.raises(Enough):
            generator.decode(generator.condition(some), some, collect)
    return made[:, :FEW]


@pytest.mark.parametrize(("guidance", "names"), [(3.0, CATALOGUE), *SLOW])
def test_exact_methods_in_batches_begin_as_plain_decoding(model: Model, guidance: float, names: list[str]) -> None:
    expected = first_tokens(model, "plain", guidance, 1)
    for name in names:
        assert torch.equal(first_tokens(model, name, guidance, 2), expected), name


WHOLE = ("medusa",)  # in the default run


@pytest.fixture(scope="module")
def plain(model: Model) -> list[list[int]]:
    return tokens_of(model, "plain")


def tokens_of(model: Model, method: str) -> list[list[int]]:
    requested = [Request(prompt="a red apple", seed=1), Request(prompt="cat", seed=7)]
    return [image.tokens.tolist() for image in generate(model, requested, method=method, batch=2, with_pixels=False)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WHOLE else pytest.mark.slow) for name in METHODS]
)
def test_the_model_has_the_parts_of_every_method(model: Model, plain: list[list[int]], name: str) -> None:
    made = tokens_of(model, name)
    assert [len(tokens) for tokens in made] == [256, 256]
    assert made == plain or METHODS[name].promise != "tokens"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_fused_passes_give_the_tokens_of_plain_decoding_in_any_batch(dtype: str) -> None:
    model = load_model(device="cpu", dtype=dtype, engine=CpuEngine())
    requested = [Request(prompt=prompt, seed=5) for prompt in ("a red apple", "cat")]
    sampling = Sampling(guidance=7.5)

    def tokens(method: str, some: list[Request]) -> list[list[int]]:
        made = generate(model, some, method=method, sampling=sampling, batch=2, with_pixels=False)
        return [picture.tokens.tolist() for picture in made]

    plain = tokens("plain", requested)
    assert tokens("gumbel-jacobi", requested[1:]) == plain[1:]
    assert tokens("eagle1", requested) == plain


def test_relaxed_picture_takes_fewer_passes_and_reports_total_variation(model: Model) -> None:
    (picture,) = generate(model, [Request(prompt="a pink elephant")], method="lantern++")
    statistics = picture.statistics
    assert statistics.steps < 256 / 1.5
    assert statistics.relaxed > 0
    assert 0 < statistics.total_variation < 0.5
    assert picture.pixels is not None and picture.pixels.shape == (64, 64, 3)
