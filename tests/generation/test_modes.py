"""Tokens and pixels do not depend on the modes of torch that a caller is in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline, generate, load_model
from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.engines.engine import engine
from lantern.methods import METHODS
from lantern.models.llamagen.vqvae import VQVAE
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import shrunk, tiny_decoder
from tests.tiny_folder import VQ, save_tiny_model

FITTING: dict[str, Any] = {"dim": 32, "n_head": 2, "vocab_size": 32, "multiple_of": 32}  # for the cpu engine
TARGET = tiny_target(block_size=9, **FITTING)
KEYS = [(3, 0), (3, 1)]
PROMPT = "a red apple"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny_model(tmp_path_factory.mktemp("models") / "toy", generation={"scale": 4}, **FITTING)
    vq = VQVAE(replace(VQ, codebook_size=32))
    save_component(vq.state_dict(), vq.config, made / "vqvae")
    return made


@pytest.fixture
def pipe(folder: Path) -> Any:
    return LanternPipeline.from_pretrained(folder)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["eager", "cpu"])
def test_tokens_do_not_depend_on_the_default_dtype(name: str, kind: str, default_dtype: None) -> None:
    sampling, condition = Sampling(guidance=3.0, temperature=0.9, top_k=20), tiny_condition((4, 2))
    made = []
    for dtype in (torch.float32, torch.float64):
        decoder = tiny_decoder(shrunk(METHODS[name]), TARGET, sampling, engine=engine(kind))
        torch.set_default_dtype(dtype)
        made.append(decoder.generate(condition, keys=KEYS).tokens)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(*made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_loads_and_runs_under_another_default_dtype(
    dtype: torch.dtype, folder: Path, pipe: Any, default_dtype: None
) -> None:
    expected = pipe(PROMPT, generator=7, method="gumbel-jacobi", output_type="pt")
    assert expected.images.shape == (1, 3, 32, 32)  # of 8 x 8, enlarged
    torch.set_default_dtype(dtype)
    other: Any = LanternPipeline.from_pretrained(folder)
    for one in (pipe, other):
        found = one(PROMPT, generator=7, method="gumbel-jacobi", output_type="pt")
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.images, expected.images)


@pytest.mark.parametrize("kind", ["auto", "eager", "wide"])
def test_autocast_changes_neither_tokens_nor_pixels(kind: str, pipe: Any) -> None:
    how = {"generator": 7, "method": "gumbel-jacobi", "engine": kind, "output_type": "pt"}
    expected = pipe(PROMPT, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pipe(PROMPT, **how)
        decoded = pipe.decode_latents(expected.tokens, "pt")
        embedded = pipe.encode_prompt(PROMPT)[0]
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.images, expected.images)
    assert torch.equal(decoded, expected.images) and torch.equal(embedded, pipe.encode_prompt(PROMPT)[0])


def test_a_default_device_changes_nothing(folder: Path, pipe: Any) -> None:
    how = {"generator": 7, "method": "eagle1", "output_type": "pt", "scale": 1}
    expected = pipe(PROMPT, **how)
    with torch.device("meta"):
        other: Any = LanternPipeline.from_pretrained(folder)
        found = [one(PROMPT, **how) for one in (pipe, other)]
        picture = pipe.decode_latents(expected.tokens, scale=1)[0]
        kept = pipe(PROMPT, **how, init_image=picture, keep_rows=2)
        (made,) = generate(load_model(folder, dtype="fp32"), [PROMPT], seed=7, method="eagle1")
    assert all(torch.equal(one.tokens, expected.tokens) for one in found)
    assert kept.tokens.device.type == "cpu" and torch.equal(made.tokens, expected.tokens.flatten())


def test_a_compiled_drafter_gives_the_same_tokens(pipe: Any) -> None:
    how = {"generator": 7, "method": "eagle1", "engine": "cpu", "output_type": "latent"}
    expected = pipe(PROMPT, **how)
    pipe.drafter = torch.compile(pipe.drafter, backend="eager")
    assert torch.equal(pipe(PROMPT, **how).tokens, expected.tokens)


def test_a_call_leaves_the_gradients_of_parts_as_they_are(pipe: Any) -> None:
    parts = (pipe.text_encoder, pipe.transformer, pipe.vqvae, pipe.drafter)
    for requires in (True, False):
        for part in parts:
            part.requires_grad_(requires)
        pipe(PROMPT, generator=7, method="eagle1")
        assert all(weight.requires_grad == requires for part in parts for weight in part.parameters())


def test_a_generator_may_have_a_negative_seed(pipe: Any) -> None:
    how = {"method": "gumbel-jacobi", "output_type": "latent"}
    found = pipe(PROMPT, generator=torch.Generator().manual_seed(-1), **how)
    assert torch.equal(found.tokens, pipe(PROMPT, generator=2**63 - 1, **how).tokens)
