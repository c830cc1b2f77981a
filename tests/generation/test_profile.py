"""Profiles: where they are stored, when they are valid, and how "auto" uses them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.core.io import write_json
from lantern.core.sampling import Sampling
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EagerEngine, WideEngine
from lantern.generation.choice import VERSION, cache_folder, choose_method, describe_machine, place_of, too_far
from lantern.methods import METHODS
from lantern.models.folder import PROFILE_NAME, Model, load_model


@pytest.fixture
def model(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load_model(copied, parts=("drafter",))


def write(model: Model, /, **changes: Any) -> Path:
    found: dict[str, Any] = {
        "version": VERSION,
        "machine": describe_machine(model),
        "model": {"name": model.name, "weights": model.weights_digest},
        "sampling": {"guidance": 3.0, "temperature": 1.0, "top_k": 12, "top_p": 1.0, "guidance_interval": -1},
        "choice": {"method": "eagle1", "settings": {"tree": "0 1 0.0"}},
    }
    for name, changed in changes.items():
        found[name] = found[name] | changed
    write_json(place_of(model), found)
    return place_of(model)


def reported(model: Model, **options: Any) -> tuple[str, list[str]]:
    lines: list[str] = []
    method = choose_method(model, "auto", report=lines.append, **options)
    return f"{method.name} {method.tree}", lines


def test_auto_is_the_method_of_the_profile(model: Model) -> None:
    assert model.folder is not None and write(model) == model.folder / PROFILE_NAME
    assert reported(model) == ("eagle1 0 1 0.0", [])
    assert choose_method(model, "auto", {"tree": "chain_2"}).tree == "chain_2"
    assert "lantern tune" in choose_method(model, "auto").reason
    write(model, choice={"method": "plain", "settings": {}})
    assert choose_method(model, "auto").name == "plain"
    assert choose_method(model, "eagle1") == METHODS["eagle1"]  # only "auto" reads it


@pytest.mark.parametrize("is_packaged", [False, True])
def test_without_write_access_it_is_in_the_cache(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_packaged: bool
) -> None:
    if is_packaged:
        monkeypatch.setattr("lantern.generation.choice.PACKAGE", model.folder.resolve().parent)
    else:
        monkeypatch.setattr("os.access", lambda path, mode: path != model.folder)
    assert (
        write(model) == cache_folder() / f"{model.weights_digest}.json" and not (model.folder / PROFILE_NAME).exists()
    )
    assert reported(model) == ("eagle1 0 1 0.0", [])
    write_json(model.folder / PROFILE_NAME, {"version": 99})  # one that does not fit, which the folder came with
    assert reported(model) == ("eagle1 0 1 0.0", [])


def test_a_profile_is_of_the_weights_as_they_are_stored(model: Any) -> None:
    pipe = LanternPipeline.from_pretrained(model.folder, torch_dtype=torch.float16)
    assert pipe.model.weights_digest == model.weights_digest == load_model(model.folder, dtype="fp16").weights_digest


def test_a_profile_does_not_change_the_fingerprint(model: Any) -> None:
    before = model.fingerprint
    write(model)
    assert load_model(model.folder, parts=()).fingerprint == before


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"machine": {"name": "another processor"}}, "measured with name another processor"),
        ({"machine": {"threads": 999}}, "measured with threads 999"),
        ({"machine": {"dtype": "bf16"}}, "measured with dtype bf16, here it is fp32"),
        ({"machine": {"passes": "fused"}}, "measured with passes fused, here it is as torch runs them"),
        ({"sampling": {"guidance": 7.5}}, "measured at guidance 7.5, this is 3"),
        ({"sampling": {"guidance": 1.0}}, "measured at guidance 1"),
        ({"sampling": {"temperature": 0.0}}, "measured at temperature 0"),
        ({"sampling": {"temperature": 0.5}}, "measured at temperature 0.5"),
        ({"sampling": {"top_p": 0.5}}, "measured at top_p 0.5"),
        ({"sampling": {"top_k": 2}}, "measured at top_k 2"),
        ({"model": {"weights": "0" * 64}}, "other weights"),
        ({"choice": {"method": "eagel9"}}, 'method "eagel9" is unknown'),
        ({"choice": {"method": None}}, 'method "None" is unknown'),
        ({"choice": {"method": "eagle1", "settings": {"delta": 1}}}, "no setting delta"),
        ({"choice": {"method": "eagle1", "settings": [1]}}, "cannot convert"),
        ("{", "is not JSON"),
        ("[]", "wanted an object"),
        ('{"version": 99}', "has version 99"),
        ('{"version": 2}', "'machine' is missing"),
    ],
)
def test_a_profile_that_does_not_fit_is_reported_and_not_used(model: Model, changes: Any, output: str) -> None:
    path = write(model, **({} if isinstance(changes, str) else changes))
    if isinstance(changes, str):
        path.write_text(changes)
    method, [line, *_] = reported(model)
    assert method == "gumbel-jacobi None" and output in line and "lantern tune" in line


def test_a_profile_of_similar_sampling_is_used() -> None:
    there = Sampling(guidance=3.0)
    for here in (there, Sampling(guidance=2.0), Sampling(guidance=4.5, temperature=0.9), Sampling(top_k=800)):
        assert too_far(there, here, 2048) == ""
    assert too_far(Sampling(guidance=0), Sampling(guidance=1), 24) == ""


def test_engines_of_different_speed_have_different_names(model: Model) -> None:
    eager = [EagerEngine(), EagerEngine(weights="int4"), EagerEngine(weights="int8")]
    engines = [*eager, WideEngine(), GraphEngine(), CpuEngine(), CpuEngine(weights="int8")]
    words = [dataclasses.replace(model, engine=engine).passes for engine in engines]
    assert len(set(words)) == len(words)
