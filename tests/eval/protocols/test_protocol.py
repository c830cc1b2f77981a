"""Protocols: shipped ones have the published settings, and errors name file and key."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from lantern.core.config import build_config, embedded_model
from lantern.eval.metrics.quality import METRICS
from lantern.eval.protocols.protocol import PromptSet, Protocol, find_prompts, known_protocols, load_protocol, resizing
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import SIZES
from tests.refusals import refused
from tests.tiny import tiny_target


def values(**changes: Any) -> dict[str, Any]:
    """A protocol as its file has it."""
    own: dict[str, Any] = {"name": "mine", "summary": "two prompts", "source": "here", "metrics": [], "guidance": 3.0}
    own |= {"prompts": {"file": "two.txt", "sha256": "0" * 64, "count": 2, "origin": "nowhere"}}
    own |= {"sizes": [8], "evaluated_size": 8, "resize": "none"}
    return {name: value for name, value in (own | changes).items() if value != "left out"}


def protocol(**changes: Any) -> Protocol:
    return build_config(Protocol, values(**changes), source="mine.json")


@pytest.mark.parametrize("name", known_protocols())
def test_a_shipped_protocol_is_complete(name: str) -> None:
    found = load_protocol(name)
    assert found.name == name and found.metrics and set(found.metrics) <= set(METRICS)
    assert build_config(Protocol, json.loads(json.dumps(asdict(found))), source=name) == found  # as a row has it
    assert resizing(found.resize, found.evaluated_size) is None or found.resize != "none"


def test_emoji_uses_the_embedded_models_sampling() -> None:
    found: Any = load_protocol("emoji")
    own = json.loads((embedded_model() / "model_index.json").read_text())["generation"]
    assert (found.guidance, found.temperature) == (own["guidance"], own["temperature"])
    prompts = find_prompts(found.prompts)
    requested = found.requests(prompts)
    assert len(prompts) == 478 and len(requested) == 2390
    assert [request.prompt for request in requested[478:956]] == prompts and requested[478].number == 478
    labels = [request.label for request in load_protocol("imagenet-50k").requests()]
    assert labels == [*range(1000)] * 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, "name"),
        ({"classes": 10}, "prompts or classes"),
        ({"prompts": "left out"}, "prompts or classes"),
        ({"guidance": "left out"}, "guidance or guidance_by_model"),
        ({"guidance_by_model": {"B": 2.0}}, "guidance or guidance_by_model"),
        ({"guidance": -1.0}, "guidance"),
        ({"temperature": 1000.0}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"sizes": []}, "sizes"),
        ({"pictures_each": 0}, "pictures_each"),
        ({"resize": "nearest"}, "resize"),
        ({"prompts": {"file": "a/b", "sha256": "0" * 64, "count": 1, "origin": ""}}, "without a folder"),
    ],
)
def test_a_fault_is_named_with_its_file(changes: dict[str, Any], message: str) -> None:
    assert message in refused(protocol, **changes, match="mine.json")


def prompt_set(folder: Path, name: str, text: str, count: int, **how: Any) -> PromptSet:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.encode())
    return PromptSet(name, hashlib.sha256(text.encode()).hexdigest(), count, "elsewhere", **how)


def test_prompts_are_read_in_every_form(tmp_path: Path) -> None:
    for form, name, text, prompts in (
        ("table", "a.csv", 'Prompt\nThree, with two\n"Head shot" of it\n', ["Three, with two", '"Head shot" of it']),
        ("table", "b.tsv", "Category\tPrompt\nAbstract\tbond\n", ["bond"]),
        ("json", "c.json", '["Ma motorcycle", "a dog"]', ["Ma motorcycle", "a dog"]),
        ("lines", "d.txt", "a cat\n\na dog\n", ["a cat", "a dog"]),
    ):
        assert find_prompts(prompt_set(tmp_path, name, text, len(prompts), form=form), tmp_path) == prompts


def test_other_and_missing_prompts_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = prompt_set(tmp_path, "d.txt", "a cat\n", 1)
    (tmp_path / "d.txt").write_text("a dog\n")
    message = rf"d\.txt has sha256 .*, wanted {expected.sha256[:12]}.*get it from elsewhere"
    refused(find_prompts, expected, tmp_path, match=message)
    assert "has 1 prompts, wanted 2" in refused(find_prompts, prompt_set(tmp_path, "d.txt", "a cat\n", 2), tmp_path)
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path))
    message = r"none\.txt .*github\.com/them\) is missing: put it into .*/prompts, or give"
    line = refused(find_prompts, PromptSet("none.txt", "0" * 64, 1, "github.com/them"), match=message)
    assert str(tmp_path / "prompts") in line


def test_a_model_that_does_not_fit_is_rejected(model: Model) -> None:
    protocol().check_model(model)
    few = Model("few", tiny_target(model_type="c2i", num_classes=3, cls_token_num=1))
    classes: dict[str, Any] = {"prompts": "left out", "classes": 4}
    for changes, given, message in (
        ({"sizes": [256, 512]}, model, "needs images of 256 or 512 pixels, toy makes 8"),
        (classes, model, "is a protocol of classes, but model toy takes prompts"),
        (classes, few, "has 4 classes, model few has 3"),
    ):
        refused(protocol(**changes).check_model, given, match=message)


def test_guidance_depends_on_the_model_size(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    by_size = protocol(guidance="left out", guidance_by_model={"B": 2.0, "XL": 1.75})
    assert protocol().sampling(model).guidance == 3.0
    assert "B 2, XL 1.75; toy is of another size" in refused(by_size.sampling, model)
    config = model.target.config
    monkeypatch.setitem(SIZES, "XL", {"dim": config.dim, "n_layer": config.n_layer, "n_head": config.n_head})
    assert by_size.sampling(model).guidance == 1.75


def test_crop_lanczos_is_pillows_on_the_central_square_and_bicubic_needs_squares() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    crop, bicubic = (cast(Any, resizing(name, 16)) for name in ("crop-lanczos", "bicubic"))
    expected = Image.fromarray(pixels).crop((16, 0, 64, 48)).resize((16, 16), Image.Resampling.LANCZOS)
    assert (crop(pixels) == np.asarray(expected)).all()
    assert (crop(pixels[:16, :16]) == pixels[:16, :16]).all()
    flat = np.full((24, 24, 3), 77, dtype=np.uint8)
    assert bicubic(flat).shape == (16, 16, 3) and (bicubic(flat) == 77).all()
    assert "24 x 12, wanted a square" in refused(bicubic, flat[:12])
