"""The recipe of photographs: from class folders to class-conditional images and their KID, at toy size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli import generate
from lantern.cli.main import main
from lantern.training.data import DataConfig, Prepared, prepare
from lantern.training.stages import find_recipe
from tests.cli.calls import Capture
from tests.eval.tiny_metrics import save_tiny_inception
from tests.training.drawings import SMALL_TARGET, SMALL_VQ, small_configs

COLOURS = {"green_leaf": (30, 180, 60), "red_brick": (220, 30, 30), "sky": (40, 60, 220)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images in each of three class folders, darker on the right; one file is no image."""
    shade = np.linspace(60, 0, 48)[None, :, None]
    for number, (name, colour) in enumerate(COLOURS.items()):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(8):
            noise = np.random.default_rng(8 * number + i).integers(0, 20, (40, 48, 3))
            picture = (np.array(colour) + noise + shade).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(folder / f"{i}.jpg")
    (tmp_path / "photos" / "sky" / "torn.jpg").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The committed config with small models, and images of 16 x 16 pixels."""
    changes: dict[str, dict[str, Any]] = {
        "data-photos": {"size": 16, "held_out": 0.2},
        "tokenizer-small": {"model": SMALL_VQ, "batch": 4, "free_steps": 1},
        "target-photos": {"model": SMALL_TARGET, "batch": 4},
    }
    return small_configs(tmp_path / "configs", "all-photos", changes, find_recipe("photos"))


def test_mirrors_of_training_pictures_are_added(photos: Path, tmp_path: Path) -> None:
    summary = prepare(DataConfig("classes", size=16, held_out=0.2, mirrors=True), out=tmp_path / "data", path=photos)
    assert (summary.num_skipped, summary.skipped) == (1, ("sky/torn.jpg: not an image that can be read",))
    prepared = Prepared.open(tmp_path / "data")
    pictures, held = prepared.images(), [r for r in prepared.records if r.split == "heldout"]
    assert held and all(record.variant == "original" for record in held)
    assert len(prepared.records) == 2 * 24 - len(held)
    mirrors = [record.image for record in prepared.records if record.variant == "mirror"]
    assert len(mirrors) == 24 - len(held)
    for number in mirrors:
        assert torch.equal(pictures[number], pictures[number - 1].flip(2))
        assert prepared.records[number].concepts == prepared.records[number - 1].concepts


@pytest.mark.slow
def test_class_folders_become_a_model(photos: Path, config: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "model"
    given = ["train", "all", "--recipe", "photos", "--config", str(config), "--path", str(photos), "--out", str(out)]
    assert main([*given, "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "--class-label 0" in text
    names = [name.replace("_", " ") for name in COLOURS]
    assert json.loads((out / "model" / "transformer" / "classes.json").read_text())["classes"] == names
    label = ["--class-label", "2", "--out", str(tmp_path / "made.png")]
    assert generate.main(["--model", str(out / "model"), *label]) == 0
    with Image.open(tmp_path / "made.png") as picture:
        assert picture.size[0] >= 16
    real, weights = out / "data", f"inception={save_tiny_inception(tmp_path / 'inception.pt')}"
    words = ["--class-label", "0", "-n", "4", "--scale", "1", "--out", str(tmp_path / "made")]
    assert generate.main(["--model", str(out / "model"), *words]) == 0
    measured = [str(tmp_path / "made"), "--reference", str(real), "--weights", weights, "--metrics", "kid"]
    assert main(["eval", *measured]) == 0
    assert f"of {real.name}" in capsys.readouterr().out
