import json
import shutil
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Verifier
from lantern.drafters.trees import named
from lantern.engines.engine import engine
from lantern.eval.speed import shapes
from lantern.eval.speed.bench import WIDTH, render
from lantern.eval.speed.shapes import ShapeOptions, deepest, script
from lantern.models.llamagen.transformer import TransformerConfig
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.scripted import ScriptedVerifier
from tests.eval.workers import CPU
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ON_CPU = ("eagle1", "lantern++")
TINY = {"dim": 32, "n_layer": 2, "n_head": 2, "multiple_of": 16, "caption_dim": 8, "cls_token_num": 6}


@pytest.mark.parametrize("tau", [1.0, 2.0, 2.3, 3.0, 3.5, 4.0])
def test_a_script_has_its_mean(tau: float) -> None:
    counts = script(tau, 200)
    sums = torch.tensor(counts).cumsum(0)
    ideal = tau * torch.arange(1, len(counts) + 1)
    assert float((sums - ideal).abs().max()) < 1
    assert sum(counts) >= 200 > sum(counts[:-1])


@pytest.mark.parametrize("tau", [1.0, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(
    ("kind", "method"), [("eager", "eagle1"), *(pytest.param("cpu", name, marks=NEEDS_COMPILER) for name in ON_CPU)]
)
def test_a_scripted_verifier_gives_the_requested_tau(tau: float, images: int, kind: str, method: str) -> None:
    target, counts = tiny_target(block_size=64, dim=64, vocab_size=32), script(tau, 63)
    made = tiny_decoder(method, target, Sampling(guidance=3.0), tree="grown_8_2", engine=engine(kind))
    parts = shapes.scripted(made, counts, named("grown_8_2").shape())
    keys = [(0, number) for number in range(images)]
    made = parts.generate(tiny_condition((4,) * images), keys=keys, keep_history=True)
    assert (made.steps - 1).tolist() == [len(counts)] * images
    assert [int(step.counts[0]) for step in made.history[1:-1]] == counts[:-1]
    assert isinstance(parts.verifier, Verifier) and float(made.total_variation.abs().max()) == 0


def test_random_models_hold_no_values_that_were_not_written() -> None:
    config = TransformerConfig(model_type="t2i", vocab_size=32, block_size=16, **TINY)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        made = shapes.random_model(config, ["eagle1"], CPU, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    networks = [made.target, made.vq, made.drafter]
    values = {name: value for one in networks if one is not None for name, value in one.state_dict().items()}
    assert len(networks) == 3 and "cls_embedding.uncond_embedding" in values
    assert [name for name, value in values.items() if not value.isfinite().all()] == []


def test_a_script_deeper_than_its_tree_is_rejected() -> None:
    message = "the script accepts 2 drafted tokens in a step, the tree has depth 1"
    refused(ScriptedVerifier, GumbelVerifier(), (3,), (1,), 16, match=message)
    refused(script, 0.5, 10, match="at least 1")
    options = ShapeOptions("B", taus=(4.0,), tree="chain_2", changes=TINY, device="cpu")
    refused(shapes.measure, options, match="choose a deeper --tree")


def test_the_scripted_path_descends_the_tree() -> None:
    shape = named("narrow_10").shape()
    path = deepest(shape)
    assert [int(shape.depths[node]) for node in path] == [1, 2, 3, 4, 5]
    assert [int(shape.parents[node]) for node in path] == [0, *path[:-1]]


@pytest.mark.parametrize("drafters", [["eagle1"], ["parallelspec", "lantern++:drafts=parallelspec", "eagle1"]])
def test_a_size_is_measured_with_scripted_acceptance(drafters: list[str]) -> None:
    how: Any = {"dtypes": ("fp32",), "kinds": ("eager",), "changes": TINY | {"vocab_size": 64, "block_size": 64}}
    what: Any = {"drafters": drafters, "taus": (2.0, 2.5), "tokens": 12, "tree": "grown_8_2", "images": 2}
    found = shapes.measure(ShapeOptions("B", is_quiet=True, **what, **how))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    one_each = [f"{name}, tau {tau}" for name in drafters for tau in ("2", "2.5")]
    names = one_each if len(drafters) > 1 else ["tau 2", "tau 2.5"]
    assert [one["method"] for one in found["contenders"]] == ["plain", *names]
    assert [one["method"] for one in found["results"]] == names and found["drafter"] == ", ".join(drafters)
    assert all(one["ms_per_token"]["median"] > 0 and one["roofline"] > 0 for one in found["contenders"])
    assert [one["method"] for one in found["phases"]] == ["plain", *names]
    assert all(sum(one["shares"].values()) == pytest.approx(1, abs=1e-3) for one in found["phases"])
    assert all(len(line) <= WIDTH or "no claim" in line for line in render(found).splitlines())
