"""Profiles: where they are stored, when they are valid, and how "auto" uses them."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from lantern.core.sampling import Sampling
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EagerEngine, WideEngine
from lantern.generation.generator import choose_method
from lantern.generation.tuning.profile import (
    NAME,
    VERSION,
    cache_folder,
    describe_machine,
    place_of,
    too_far,
    write_profile,
)
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model


@pytest.fixture
def model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load_model(shutil.copytree(folder, tmp_path / "toy"), parts=("drafter",))


def profile(made_for: Model, /, **changes: Any) -> dict[str, Any]:
    choice = {"method": "eagle1", "settings": {"tree": "0 1 0.0"}}
    sampling = {"guidance": 3.0, "temperature": 1.0, "top_k": 12, "top_p": 1.0, "guidance_interval": -1}
    found = {
        "version": VERSION,
        "machine": describe_machine(made_for),
        "model": {"name": made_for.name, "fingerprint": made_for.fingerprint},
        "sampling": sampling,
        "choice": choice,
    }
    return found | changes


def reported(model: Model, **options: Any) -> tuple[str, list[str]]:
    lines: list[str] = []
    method = choose_method(model, "auto", report=lines.append, **options)
    return f"{method.name} {method.tree}", lines


def test_auto_is_the_method_of_the_profile(model: Model) -> None:
    path = write_profile(profile(model), place_of(model))
    assert model.folder is not None and path == model.folder / NAME
    assert reported(model) == ("eagle1 0 1 0.0", [])
    assert choose_method(model, "auto", {"tree": "chain_2"}).tree == "chain_2"
    assert "lantern tune" in choose_method(model, "auto").reason
    write_profile(profile(model, choice={"method": "plain", "settings": {}}), place_of(model))
    assert choose_method(model, "auto").name == "plain"


def test_nothing_is_written_into_the_installed_package(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.folder is not None
    monkeypatch.setattr("lantern.generation.tuning.profile.PACKAGE", model.folder.resolve().parent)
    path = write_profile(profile(model), place_of(model))
    assert path.parent == cache_folder() and not (model.folder / NAME).exists()
    assert reported(model) == ("eagle1 0 1 0.0", [])


def test_other_methods_do_not_read_the_profile(model: Model) -> None:
    write_profile(profile(model), place_of(model))
    assert choose_method(model, "eagle1") == METHODS["eagle1"]


def test_without_a_profile_auto_is_a_window_that_is_nearly_free(model: Model) -> None:
    assert choose_method(model, "auto") == METHODS["gumbel-jacobi"].with_options(window=4)


def test_a_profile_does_not_change_the_fingerprint(model: Model) -> None:
    before = model.fingerprint
    write_profile(profile(model), place_of(model))
    assert model.folder is not None
    assert load_model(model.folder, parts=()).fingerprint == before


def test_keys_are_sorted_and_no_partial_file_stays(model: Model) -> None:
    path = write_profile(profile(model), place_of(model))
    found = json.loads(path.read_text())
    assert list(found) == sorted(found) and list(found["machine"]) == sorted(found["machine"])
    assert [one.name for one in path.parent.glob(".*")] == []


def test_the_profile_of_a_read_only_folder_is_in_the_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != model.folder)
    path = write_profile(profile(model), place_of(model))
    assert path == cache_folder() / f"{model.fingerprint}.json"
    assert reported(model) == ("eagle1 0 1 0.0", [])


INVALID = "recommends an invalid method"


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"machine": {"name": "another processor"}}, "measured with name another processor"),
        ({"machine": {"threads": 999}}, "measured with threads 999"),
        ({"machine": {"dtype": "bf16"}}, "measured with dtype bf16, here it is fp32"),
        ({"machine": {"passes": "fused"}}, "measured with passes fused, here it is as torch runs them"),
        ({"model": {"fingerprint": "0" * 64}}, "other weights"),
        ({"choice": {"method": "eagel9"}}, INVALID),
        ({"choice": {}}, INVALID),
        ({"choice": {"method": "eagle1", "settings": {"delta": 1}}}, INVALID),
        ({"choice": {"method": "eagle1", "settings": [1]}}, INVALID),
        ("{", "is not JSON"),
        ("[]", "wanted an object"),
        ('{"version": 99}', "has version 99"),
        ('{"version": 2}', "'machine' is missing"),
    ],
)
def test_a_profile_that_does_not_fit_is_reported_and_not_used(model: Model, changes: Any, output: str) -> None:
    if isinstance(changes, str):
        assert model.folder is not None
        (model.folder / NAME).write_text(changes)
    else:
        machine = describe_machine(model) | changes.get("machine", {})
        write_profile(profile(model, **(changes | {"machine": machine})), place_of(model))
    method, [line, *_] = reported(model)
    assert method == "gumbel-jacobi None" and output in line and "lantern tune" in line


@pytest.mark.parametrize(
    ("here", "output"),
    [
        ({"guidance": 7.5}, "guidance 3"),
        ({"guidance": 1.0}, "guidance 3"),
        ({"temperature": 0.0}, "temperature 1"),
        ({"temperature": 0.5}, "temperature 1"),
        ({"top_p": 0.5}, "top_p 1"),
        ({"top_k": 2}, "top_k 12"),
    ],
)
def test_a_profile_of_very_different_sampling_is_not_used(model: Model, here: dict[str, Any], output: str) -> None:
    write_profile(profile(model), place_of(model))
    method, [line, *_] = reported(model, sampling=model.sampling(**here))
    assert output in line and method != "eagle1 0 1 0.0"


def test_a_profile_of_similar_sampling_is_used() -> None:
    there = Sampling(guidance=3.0)
    for here in (there, Sampling(guidance=2.0), Sampling(guidance=4.5, temperature=0.9), Sampling(top_k=800)):
        assert too_far(there, here, 2048) == ""
    assert too_far(Sampling(guidance=0), Sampling(guidance=1), 24) == ""


def test_the_api_logs_why_a_profile_is_not_used(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    write_profile(profile(model, model={"fingerprint": "?"}), place_of(model))
    with caplog.at_level(logging.INFO, logger="lantern"):
        choose_method(model, "auto")
    assert "other weights" in caplog.text


def test_engines_of_different_speed_have_different_names(model: Model) -> None:
    eager = [EagerEngine(), EagerEngine(weights="int4"), EagerEngine(weights="int8")]
    engines = [*eager, WideEngine(), GraphEngine(), CpuEngine(), CpuEngine(weights="int8")]
    words = [dataclasses.replace(model, engine=engine).passes for engine in engines]
    assert len(set(words)) == len(words)
