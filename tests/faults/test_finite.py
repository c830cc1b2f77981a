"""NaN and infinity: no image is sampled from them, and debug mode names the layer."""

import dataclasses
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.generation.generator import generate
from lantern.generation.images import NotFiniteError, Picture
from lantern.generation.requests import Request, as_requests
from lantern.methods import METHODS
from lantern.models.folder import Model
from tests.refusals import refused

APPLES = as_requests(["a red apple"] * 3)


def make(model: Model, requested: list[Request] = APPLES, **options: Any) -> list[Picture]:
    merged: dict[str, Any] = {"method": "plain"} | options
    return list(generate(model, requested, **merged))


def spoil(target: Any, name: str, value: float) -> None:
    """Spoil a weight of a layer, or the angles of the fifth token, which a later pass reads."""
    if name == "rotary":
        target.rotary.table[target.config.cls_token_num + 5] = value
    else:
        target.get_parameter(f"{name}.weight").data.view(-1)[0] = value


def spoil_third_picture(model: Model) -> None:
    """Set the embedding of a token to NaN that only the third image has, before its last position."""
    tokens = [set(picture.tokens[:-1].tolist()) for picture in make(model, with_pixels=False)]
    only = tokens[2] - tokens[0] - tokens[1]
    model.target.tok_embeddings.weight.data[min(only)] = torch.nan


METHODS_OF_EACH_KIND = ("plain", "eagle1", "eagle1-rejection", "lantern++", "sjd", "gumbel-jacobi")


def spoil_one_pass(model: Model, value: float) -> None:
    """Put `value` into the second image's distribution after the root, for one token in pass 2 only."""
    forward, steps = model.target.forward, count()

    def spoilt(*args: Any, **named: Any) -> Any:
        scores = forward(*args, **named)
        if next(steps) != 2:
            return scores
        logits = scores.logits.clone()
        logits.unflatten(0, (3, -1))[1, 0, 0, 5] = value
        return dataclasses.replace(scores, logits=logits)

    model.target.forward = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("method", "value"),
    [*((method, torch.nan) for method in METHODS_OF_EACH_KIND), ("plain", torch.inf), ("eagle1", -torch.inf)],
)
def test_nan_or_infinity_in_one_pass_rejects_only_its_picture(model: Model, method: str, value: float) -> None:
    settings = {"k": 4} if METHODS[method].settings.get("k") else None
    expected = [picture.tokens_sha256 for picture in make(model, method=method, settings=settings, batch=3)]
    spoil_one_pass(model, value)
    made = []
    line = r"'a red apple', seed 0, image 1: .* NaN or infinite .* --debug"
    with pytest.raises(NotFiniteError, match=line):
        for picture in generate(model, APPLES, method=method, settings=settings, batch=3):
            made.append(picture.tokens_sha256)
    assert made == [expected[0], expected[2]]


def test_the_command_writes_no_picture_of_nan_and_names_the_layer_in_debug_mode(
    run: Any, tmp_path: Path, changed_models: Any
) -> None:
    changed_models(spoil_third_picture)
    out, tokens = tmp_path / "out", tmp_path / "t.json"
    words = ("-n", 3, "--batch", 3, "--method", "plain", "--json")
    code, shown, error = run(*words, "--out", out, "--tokens", tokens)
    found = json.loads(shown)
    assert code == 1 and error.count("\n") == 1
    assert "image 2: the model's distribution became NaN or infinite" in error
    assert sorted(map(str, out.iterdir())) == sorted(found["paths"]) and len(found["paths"]) == 2
    assert (found["asked"], len(found["pictures"]), len(json.loads(tokens.read_text()))) == (3, 2, 2)
    assert "NaN or infinite" in found["stopped"]
    code, _, error = run(*words, "--tokens", tmp_path / "u.json", "--debug")
    first, *_, last = error.splitlines()
    assert (code, last) == (1, "lantern: error: transformer.tok_embeddings gave NaN") and first.startswith("Traceback")
    assert not (tmp_path / "u.json").exists()


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("layers.1.feed_forward.w2", torch.nan, "NaN"),
        ("output", torch.inf, "infinity"),
        ("cls_embedding.cap_proj.fc2", torch.nan, "NaN"),
        ("rotary", torch.nan, "NaN"),
    ],
)
def test_debug_mode_names_the_layer(
    model: Model, name: str, value: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(model.target, name, value)
    for method in ("plain", "eagle1"):
        line = refused(make, model, method=method, debug=True, error=NotFiniteError)
        assert line == f"transformer.{name} gave {word}"
    monkeypatch.setenv("LANTERN_DEBUG", "1")
    refused(make, model, error=NotFiniteError, match=f"{name} gave {word}")


def test_debug_mode_names_a_layer_of_the_drafter_without_which_exact_pictures_stay_the_same(model: Model) -> None:
    expected = [picture.tokens_sha256 for picture in make(model)]
    model.drafter.fc.weight.data[0, 0] = torch.nan
    assert [picture.tokens_sha256 for picture in make(model, method="eagle1")] == expected
    assert [picture.tokens_sha256 for picture in make(model, debug=True)] == expected
    refused(make, model, method="eagle1", debug=True, error=NotFiniteError, match="drafter.fc gave NaN")


def test_the_pipeline_error_holds_finite_pictures_and_names_the_layer_in_debug_mode(folder: Path) -> None:
    pipe: Any = LanternPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    spoil_third_picture(pipe.model)
    with pytest.raises(NotFiniteError, match="image 2") as refused:
        pipe("a red apple", generator=0, num_images_per_prompt=3, method="plain", batch_size=1)
    assert [picture.request.number for picture in refused.value.sound] == [0, 1]
    with pytest.raises(NotFiniteError, match="transformer.tok_embeddings gave NaN"):
        pipe("a red apple", generator=0, num_images_per_prompt=3, method="plain", debug=True)
