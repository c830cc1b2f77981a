"""`lantern tune` on a toy model, and method "auto" with its profile."""

import json
import shutil
from pathlib import Path

import pytest

from lantern.cli.main import main
from lantern.drafters.trees.static import named
from lantern.generation.choice import choose_method
from lantern.models.folder import load_model
from tests.cli.calls import Capture, answer, refused_by
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model with a peaked distribution over 256 tokens, which a random drafter never predicts."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    save_tiny_model(folder, generation={"guidance": 3.0, "temperature": 0.1}, vocab_size=256)
    shutil.rmtree(folder / "vqvae")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(saved, tmp_path / "toy")


def test_with_random_drafter_weights_auto_is_plain(folder: Path, capsys: Capture) -> None:
    assert choose_method(load_model(folder), "auto").name == "gumbel-jacobi"
    drafted = ["--methods", "eagle1", "eagle1-rejection", "--max-nodes", "8", "--max-depth", "3"]
    found = answer(capsys, "tune", "--model", str(folder), "--images", "2", "--json", "--quiet", *drafted)
    assert found["choice"]["method"] == "plain" and Path(found["path"]) == folder / "profile.json"
    assert found["candidates"] and all(one["tokens_per_step"] < 1.5 for one in found["candidates"])
    assert choose_method(load_model(folder), "auto").name == "plain"
    word = ["--model", str(folder), "--prompt", "a cat", "--tokens", "t.json", "--json"]
    assert main(["generate", "--method", "auto", *word]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["method"] == "plain" and "profile" not in seen.err


def test_tokens_per_pass_of_windows_are_written_into_the_model_on_request(folder: Path, capsys: Capture) -> None:
    words = ["tune", "--model", str(folder), "--images", "2", "--quiet", "--methods", "gumbel-jacobi"]
    assert main(words) == 0 and load_model(folder).tokens_per_step == {}
    assert main([*words, "--write-model"]) == 0
    found = load_model(folder).tokens_per_step
    assert {2, 4, 8, 16} <= set(found) and all(1 <= tokens <= window for window, tokens in found.items())
    assert found[2] <= found[16]
    assert "default sampling" in refused_by(capsys, *words, "--write-model", "--temperature", "0.5")


def test_the_profile_holds_the_measurements(folder: Path, capsys: Capture) -> None:
    out = folder.parent / "own.json"
    words = ["--images", "2", "--batch", "2", "--max-nodes", "8", "--max-depth", "3", "--methods", "eagle1", "scd"]
    assert main(["tune", "--model", str(folder), "--out", str(out), *words]) == 0
    seen = capsys.readouterr()
    assert "ms/token" in seen.out and "*" in seen.out and "measuring: race" in seen.err
    found = json.loads(out.read_text())
    assert list(found) == sorted(found) and not (folder / "profile.json").exists()
    assert found["batch"] == 2 and found["sampling"]["temperature"] == 0.1
    assert found["plain"]["interval_95"] == [1.0, 1.0] and found["plain"]["rounds"] == 3
    assert found["model"]["weights"]
    assert {"device", "name", "threads", "dtype", "passes", "torch"} == set(found["machine"])
    trees = [named(one["settings"]["tree"]) for one in found["candidates"] if "tree" in one["settings"]]
    assert trees and max(tree.max_nodes for tree in trees) <= 8


def test_a_model_of_classes_is_measured_on_classes(tmp_path: Path, capsys: Capture) -> None:
    folder = save_tiny_model(tmp_path / "toy", model_type="c2i", cls_token_num=1)
    words = ["--images", "2", "--max-nodes", "4", "--max-depth", "2", "--methods", "eagle1", "--quiet"]
    assert main(["tune", "--model", str(folder), *words]) == 0
    assert "profile:" in capsys.readouterr().out
    assert "leave --prompts-file out" in refused_by(capsys, "tune", "--model", str(folder), "--prompts-file", "x")
