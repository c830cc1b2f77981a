"""Small grids, of one token and with trees and windows past the end, for every method."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern.cli.generate import main
from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.generation.generator import Decoder
from lantern.methods import METHODS, Method
from lantern.models.llamagen.vqvae import VQVAE
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder
from tests.tiny_folder import VQ, save_tiny_model

CONDITION = tiny_condition((4, 1))
KEYS = [(9, 0), (4, 7)]
SAMPLINGS = {"sampled": Sampling(guidance=3, top_k=12), "greedy": Sampling(guidance=1, temperature=0)}


def variants() -> Iterator[tuple[str, Method]]:
    """Return every method that has a chain or a window: of 12, of 4 and of 64 tokens."""
    for name, small in METHODS.items():
        if small.tree:
            yield f"{name} chain_12", small.with_options(tree="chain_12")
        if "window" in small.options:
            for window in (4, 64):
                yield f"{name} {window}", small.with_options(window=window)
            for init in ("random", "repeat-left") if "init" in small.options else ():
                yield f"{name} {init}", small.with_options(window=5, init=init)


VARIANTS = dict(variants())


def parts(method: Method, tokens: int, sampling: Sampling, form: str = "guided") -> Decoder:
    return tiny_decoder(method, target(tokens), sampling, form=form)


target = cache(lambda tokens: tiny_target(block_size=tokens))


@cache
def plainly(tokens: int, distribution: str) -> Tensor:
    return parts(METHODS["plain"], tokens, SAMPLINGS[distribution]).generate(CONDITION, keys=KEYS).tokens


@pytest.mark.parametrize(
    ("name", "distribution", "tokens"),
    [
        *((name, "sampled", 1) for name in METHODS),
        *((name, "greedy", 4) for name in (*METHODS, *VARIANTS)),
    ],
)
def test_every_method_fills_a_small_grid(name: str, distribution: str, tokens: int) -> None:
    method, sampling = METHODS.get(name) or VARIANTS[name], SAMPLINGS[distribution]
    made = parts(method, tokens, sampling).generate(CONDITION, keys=KEYS)
    assert made.tokens.shape == (2, tokens) and (made.tokens >= 0).all() and (made.tokens < 24).all()
    assert (made.steps >= 1).all() and (made.steps <= tokens).all()
    assert (made.steps + made.accepted.sum(1) >= tokens).all()
    if method.exact and (method.promise == "tokens" or distribution == "greedy"):
        assert torch.equal(made.tokens, plainly(tokens, distribution))


EAGLES = [name for name, method in METHODS.items() if method.tree and method.made.needs == ("eagle1",)]


@pytest.mark.parametrize("name", EAGLES)
def test_a_drafter_in_rows_fills_a_grid_of_one_token(name: str) -> None:
    built = parts(METHODS[name], 1, SAMPLINGS["sampled"], form="rows")
    assert built.generate(CONDITION, keys=KEYS).tokens.shape == (2, 1)


def test_the_command_makes_a_picture_of_one_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", block_size=1)
    # group norm needs more than one value per channel group, also of a single token
    vq = VQVAE(replace(VQ, ch=64))
    save_component(vq.state_dict(), vq.config, folder / "vqvae")
    out = tmp_path / "x.png"
    assert main(["--model", str(folder), "--prompt", "a red apple", "--method", "eagle1", "--out", str(out)]) == 0
    with Image.open(out) as image:
        assert image.size == (2, 2)
