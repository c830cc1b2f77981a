"""The commands of docs/train.md, at toy size: from folders of captioned images or of classes to a generated image."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lantern.cli import generate
from lantern.cli.main import main
from lantern.cli.train import AllConfig, Build, BuildStep
from lantern.core.config import load_config
from lantern.training.stages import find_config, find_recipe, find_stage
from tests.cli.calls import Capture, refused_by
from tests.eval.tiny_metrics import save_tiny_inception
from tests.refusals import refused
from tests.training.drawings import SMALL_TARGET, SMALL_VQ, noisy, small_configs

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve captioned images of three colours."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(12):
        name, colour = list(COLOURS.items())[i % 3]
        noisy(colour, i).save(folder / f"{i}.jpg")
        (folder / f"{i}.txt").write_text(f"a {name} square\n{name}\n")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The committed all-small config with small models, and images of 16 x 16 pixels."""
    changes: dict[str, dict[str, Any]] = {
        "data-folder": {"size": 16},
        "tokenizer-small": {"model": SMALL_VQ, "batch": 4, "free_steps": 1},
        "target-small": {"model": SMALL_TARGET, "batch": 4},
        "drafter-eagle1": {"batch": 2, "pictures": 4, "held_out": 2, "unroll": 2},
    }
    return small_configs(tmp_path / "configs", "all-small", changes)


def train_a_drafter(model: Path) -> None:
    """Train the drafter of docs/train.md, and put the drafter into the folder."""
    from tests.test_docs import ROOT, commands

    begins = ("lantern train drafter --kind eagle1 --data my-model", "lantern assemble my-model/model")
    chosen = [command for command in commands(ROOT / "docs/train.md") if command.startswith(begins)]
    assert len(chosen) == len(begins)
    for command in chosen:
        words = command.replace("my-model", str(model)).replace("runs/", f"{model}/runs/").split()
        steps = {"--minutes": "--steps", "30": "2"}
        assert main([steps.get(word, word) for word in words[1:]]) == 0, command


@pytest.mark.slow
def test_captioned_pictures_become_a_model(photos: Path, config: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "my-model"
    given = ["train", "all", "--config", str(config), "--path", str(photos), "--out", str(out), "--steps", "3"]
    assert main([*given, "--only", "data"]) == 0
    printed = capsys.readouterr().out
    assert "0 inputs left out" in printed and "tokenizer, target, drafter to do" in printed
    assert "wanted one of data, tokenizer, target, drafter" in refused_by(capsys, *given, "--only", "datas")
    assert main(given) == 0
    assert not list(out.glob("*/checkpoint.pt")) and not list(out.glob("*/pictures.npy"))
    assert "| target | 3 |" in (out / "model" / "README.md").read_text()
    assert "square" in (out / "model" / "words.txt").read_text().split()
    pictures = tmp_path / "pictures"
    prompt = ["--prompt", "a red square", "--out", str(pictures)]
    assert generate.main(["--model", str(out / "model"), *prompt]) == 0
    with Image.open(next(pictures.glob("*.png"))) as picture:
        assert picture.size[0] >= 16
    train_a_drafter(out)
    capsys.readouterr()
    assert main(given) == 0  # nothing is trained again
    assert capsys.readouterr().out.count("was done before") == 4
    other = [str(config.parent) if word == str(photos) else word for word in given]
    assert f"begun with --path {photos}" in refused_by(capsys, *other)


@pytest.mark.slow
def test_class_folders_become_a_model(tmp_path: Path, capsys: Capture) -> None:
    changes: dict[str, dict[str, Any]] = {
        "data-photos": {"size": 16, "held_out": 0.2},
        "tokenizer-small": {"model": SMALL_VQ, "batch": 4, "free_steps": 1},
        "target-photos": {"model": SMALL_TARGET, "batch": 4},
    }
    config = small_configs(tmp_path / "configs", "all-photos", changes, find_recipe("photos"))
    for number, (name, colour) in enumerate(COLOURS.items()):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            noisy(colour, 8 * number + i).save(tmp_path / "photos" / name / f"{i}.jpg")
    out, photos = tmp_path / "model", str(tmp_path / "photos")
    given = ["train", "all", "--recipe", "photos", "--config", str(config), "--path", photos, "--out", str(out)]
    assert main([*given, "--steps", "3"]) == 0
    assert "--class-label 0" in capsys.readouterr().out
    assert json.loads((out / "model" / "transformer" / "classes.json").read_text())["classes"] == sorted(COLOURS)
    words = ["--class-label", "2", "-n", "4", "--scale", "1", "--out", str(tmp_path / "made")]
    assert generate.main(["--model", str(out / "model"), *words]) == 0
    weights = f"inception={save_tiny_inception(tmp_path / 'inception.pt')}"
    measured = [str(tmp_path / "made"), "--reference", str(out / "data"), "--weights", weights, "--metrics", "kid"]
    assert main(["eval", *measured]) == 0
    assert "of data" in capsys.readouterr().out


@pytest.mark.slow
def test_minutes_are_shared_among_the_steps(photos: Path, config: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "timed"
    given = ["train", "all", "--config", str(config), "--path", str(photos), "--out", str(out), "--minutes", "0.2"]
    for step in ("data", "tokenizer"):
        assert main([*given, "--only", step]) == 0
    allotted = json.loads((out / "state.json").read_text())["minutes"]["tokenizer"]
    assert 0 < allotted <= 0.3 * 0.2 + 1e-6
    assert json.loads((out / "tokenizer" / "training.json").read_text())["loop"]["minutes"] == allotted
    (out / "state.json").write_text('{"done": {"data": "1"}}')
    assert "state.json: done is" in refused_by(capsys, *given)


def test_a_path_that_no_step_uses_is_refused(photos: Path, config: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ["train", "all", "--config", str(config), "--path", str(photos), "--out", str(tmp_path / "out")]
    assert f"{config} does not use --data" in refused_by(capsys, *given, "--data", str(photos))
    assert not (tmp_path / "out").exists()


def test_every_step_of_the_committed_configs_has_the_options_of_its_stage() -> None:
    emoji = find_recipe("emoji")
    recipes = {"all-small": None, "all-emoji": emoji, "all-addons": emoji, "all-photos": find_recipe("photos")}
    for name, recipe in recipes.items():
        config = load_config(AllConfig, find_config(name, recipe))
        names = {step.name for step in config.steps}
        for step in config.steps:
            stage = find_stage(step.stage, recipe)
            assert set(stage.required.split()) <= set(step.options) <= set(stage.options), step
            assert find_config(step.config, recipe).is_file()
            for value in step.options.values():
                assert value[0] == "@" or value.split("/")[0] in names | {"cache"}
        assert 0.5 < sum(step.share for step in config.steps) <= 1.0 + 1e-9


def test_steps_of_all_take_folders_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = BuildStep("drafter", "drafter", "drafter-eagle1", options={"target": "@model/transformer", "data": "data"})
    seen: dict[str, Path] = {}

    monkeypatch.setattr("lantern.cli.train.run_stage", lambda stage, config, out, options, recipe: seen.update(options))
    config, inputs = AllConfig((step,), components={}), dict[str, object](model=tmp_path / "given")
    build = Build(config, tmp_path, tmp_path / "out", inputs)
    build.run(step)
    assert seen == {"target": tmp_path / "given" / "transformer", "data": tmp_path / "out" / "data"}
    refused(build.value, "@data", match="stage all needs --data")
