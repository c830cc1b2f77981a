"""Small grids, of one token and with trees and windows past the end, for every method."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lantern.cli.generate import main
from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.methods import METHODS, Method
from lantern.models.llamagen.vqvae import VQVAE
from tests.methods import test_contracts as contracts
from tests.tiny_folder import VQ, save_tiny_model


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


EAGLES = [name for name, method in METHODS.items() if method.tree and method.made.needs == ("eagle1",)]
CASES = {
    "one token": contracts.Case(Sampling(guidance=3, top_k=12), side=1),
    "one token, rows": contracts.Case(Sampling(guidance=3, top_k=12), side=1, form="rows"),
    "greedy": contracts.Case(Sampling(guidance=1, temperature=0), side=2),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, "one token") for name in METHODS),
        *((name, "one token, rows") for name in EAGLES),
        *((name, "greedy") for name in (*METHODS, *VARIANTS)),
    ],
)
def test_every_method_fills_a_small_grid(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contracts.SPECS, name, METHODS.get(name) or VARIANTS[name])
    monkeypatch.setitem(contracts.CASES, case, CASES[case])
    contracts.test_every_method_keeps_its_promise(name, case)


def test_the_command_makes_a_picture_of_one_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", block_size=1)
    # group norm needs more than one value per channel group, also of a single token
    vq = VQVAE(replace(VQ, ch=64))
    save_component(vq.state_dict(), vq.config, folder / "vqvae")
    out = tmp_path / "x.png"
    assert main(["--model", str(folder), "--prompt", "a red apple", "--method", "eagle1", "--out", str(out)]) == 0
    with Image.open(out) as image:
        assert image.size == (2, 2)
