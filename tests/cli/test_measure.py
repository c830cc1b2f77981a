"""`lantern bench` and `lantern tune` on toy models, and method "auto" with the profile that tune writes."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.cli import measure
from lantern.cli.main import main
from lantern.core.types import Generation
from lantern.drafters.trees import named
from lantern.eval.metrics.quality import METRICS
from lantern.eval.metrics.weights import sources
from lantern.eval.speed import race
from lantern.generation.choice import choose_method
from lantern.models.folder import DTYPES, load_model
from lantern.models.llamagen.transformer import SIZES
from tests.cli.calls import Capture, answer, refused_by
from tests.tiny_folder import save_tiny_model

QUICK = ["--images", "1", "--variants", "eager", "--baseline", "eager", "--dtype", "fp32"]
QUICK += ["--methods", "eagle1", "--quiet"]


def test_options_list_all_choices() -> None:
    assert set(measure.DTYPES) == set(DTYPES) and set(measure.SHAPES) == set(SIZES)
    assert tuple(METRICS) == measure.METRICS and tuple(sources()) == measure.WEIGHTS
    page = Path(__file__).parents[2].joinpath("docs/evaluate.md").read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}`" not in page] == []


def test_json_is_one_line_and_then_the_table_is_on_stderr(model: str, tmp_path: Path, capsys: Capture) -> None:
    out, before = tmp_path / "bench.json", torch.get_num_threads()
    how = ["--threads", "1", "--guidance-interval", "5"]
    try:
        assert main(["bench", "--model", model, *QUICK, *how, "--json", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(before)
    output = capsys.readouterr()
    (line,) = output.out.splitlines()
    figures = json.loads(line)
    assert figures["races"][0]["results"][0]["claim"] is None and figures["surroundings"]["threads"] == 1
    assert figures["sampling"]["guidance_interval"] == 5
    assert out.read_text(encoding="utf-8") == line + "\n" and list(tmp_path.iterdir()) == [out]
    assert "no claim" in output.err and "images/s" in output.err
    assert main(["bench", "--model", model, *QUICK]) == 0
    output = capsys.readouterr()
    assert "plain" in output.out and "{" not in output.out and output.err == ""


def test_tokens_unlike_plain_give_exit_code_1(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = race.Contender.decode

    def altered(*given: Any, **watching: Any) -> Generation:
        made = kept(*given, **watching)
        made.tokens[0, 3] += int(made.steps[0] < made.tokens.numel())
        return made

    monkeypatch.setattr(race.Contender, "decode", altered)
    assert main(["bench", "--model", model, *QUICK]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lantern: error: eagle1 (eager fp32, batch 1) differs from plain decoding in 1 of 1")


def test_a_stopped_bench_prints_its_rounds(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, made = race.pack, []

    def interrupted(tokens: Tensor) -> str:
        made.append(kept(tokens))
        if len(made) == 6:  # in the third round of two contenders
            signal.raise_signal(signal.SIGTERM)
        return made[-1]

    monkeypatch.setattr(race, "pack", interrupted)
    out = tmp_path / "bench.json"
    words = ["--model", model, "--out", str(out), *(word for word in QUICK if word != "--quiet")]
    assert main(["bench", *words, "--images", "9"]) == 143
    output = capsys.readouterr()
    assert "terminated: figures are of the rounds before" in output.out and "batch 1: 2 rounds" in output.out
    figures = json.loads(out.read_text())
    assert figures["stopped"] == "terminated" and figures["races"][0]["rounds"] == 2
    lines = output.err.splitlines()
    assert lines[0].startswith("warming up 1 of 2: plain as eager") and lines[-1] == "lantern: error: terminated"
    assert any(line.startswith("round 2 of 9, ") and line.endswith(" minutes left") for line in lines)


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
    drafted = ["--methods", "eagle1", "scd", "--batch", "2", "--max-nodes", "8", "--max-depth", "3"]
    found = answer(capsys, "tune", "--model", str(folder), "--images", "2", "--json", "--quiet", *drafted)
    assert found["choice"]["method"] == "plain" and Path(found["path"]) == folder / "profile.json"
    assert found["candidates"] and all(one["tokens_per_step"] < 1.5 for one in found["candidates"])
    assert found["batch"] == 2 and found["sampling"]["temperature"] == 0.1 and found["model"]["weights"]
    assert found["plain"]["interval_95"] is None and found["plain"]["rounds"] == 3
    assert {"device", "name", "threads", "dtype", "passes", "torch"} == set(found["machine"])
    trees = [named(one["settings"]["tree"]) for one in found["candidates"] if "tree" in one["settings"]]
    assert trees and max(tree.max_nodes for tree in trees) <= 8
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


def test_a_model_of_classes_is_measured_on_classes(classes: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["--images", "2", "--max-nodes", "4", "--max-depth", "2", "--methods", "eagle1"]
    assert main(["tune", "--model", classes, "--out", str(tmp_path / "profile.json"), *words]) == 0
    seen = capsys.readouterr()
    assert "ms/token" in seen.out and "*" in seen.out and "measuring: race" in seen.err
    assert f"profile: {tmp_path / 'profile.json'}" in seen.out and (tmp_path / "profile.json").is_file()
    assert not (Path(classes) / "profile.json").exists()
