"""Pictures that keep rows of another, or what a mask does not cover."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli import generate as command
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.loop import ForcedTokens
from lantern.generation.generator import generate
from lantern.generation.pipeline import LanternPipeline
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.vqvae import to_pixels
from tests.cli.calls import Capture, figures, refusal
from tests.refusals import refused


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """An image of 8 x 8 pixels, and a mask whose one white pixel is in row 1, column 2 of the 4 x 4 tokens."""
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    mask = np.zeros((8, 8), np.uint8)
    mask[3, 4] = 255
    for name, pixels in (("picture", colours), ("mask", mask), ("wide", colours[:6])):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "text.png").write_text("no image")
    return {path.stem: path for path in tmp_path.glob("*.png")}


def tokens_of(model: Model, path: Path) -> list[int]:
    with torch.no_grad(), Image.open(path) as picture:
        return model.vq.encode(to_pixels(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]))[0].tolist()


@pytest.mark.parametrize("method", ["plain", "gumbel-jacobi", "eagle1", "sjd"])
def test_given_tokens_behind_the_last_free_one_need_no_pass(
    method: str, model: Model, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[Step]()
    how: dict[str, Any] = {"method": method, "init_image": files["picture"], "mask_image": files["mask"], "batch": 2}
    found = list(generate(model, ["a red apple", "a blue ring"], callback=steps.append, **how))
    assert [(one.statistics.tokens, one.statistics.steps) for one in found] == [(1, 1)] * 2  # of 16 tokens
    assert all(sum(one.statistics.reached) <= 1 for one in found)  # nothing behind counts
    monkeypatch.setattr(ForcedTokens, "end", 16)
    expected = list(generate(model, ["a red apple", "a blue ring"], **how))
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    assert expected[0].statistics.steps > 1
    for image in range(2):
        parts = [step.tokens[image, : int(step.counts[image])] for step in steps]
        assert torch.cat(parts).tolist() == found[image].tokens.tolist()


def test_a_callback_ends_the_call_at_the_tokens_that_are_kept_last(model: Model, files: dict[str, Path]) -> None:
    how: dict[str, Any] = {"method": "plain", "init_image": files["picture"], "mask_image": files["mask"]}
    at_end = generate(model, ["a red apple"] * 2, callback=lambda step: int((step.start + step.counts)[0]) == 16, **how)
    assert len([*at_end]) == 1


def test_rows_are_kept_in_few_passes(model: Model, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens of steps of one token each; steps report every token once."""
    steps, kept = list[Step](), tokens_of(model, files["picture"])[:12]
    for options in ({"batch": 2}, {"batch": 2, "sampling": Sampling(guidance=1.0)}):
        how: dict[str, Any] = {"method": "plain", "init_image": files["picture"], "keep_rows": 3, **options}
        found = list(generate(model, ["a red apple", "a blue ring"], callback=steps.append, **how))
        with monkeypatch.context() as patch:
            patch.setattr(ForcedTokens, "common_prefix", 1)
            expected = list(generate(model, ["a red apple", "a blue ring"], **how))
        assert [picture.tokens.tolist() for picture in found] == [picture.tokens.tolist() for picture in expected]
        for picture in found:
            assert picture.tokens[:12].tolist() == kept and picture.as_dict()["forced_tokens"] == 12
            # beside the prompt and the first 11 tokens, which are read: tokens 11 to 14, each of which gives the next
            figures = picture.statistics
            assert (figures.forced, figures.steps, figures.tokens, figures.tokens_per_step) == (12, 4, 4, 1.0)
    reported = [torch.cat([step.tokens[i] for step in steps[5:]]).tolist() for i in range(2)]
    assert reported == [picture.tokens.tolist() for picture in found]
    assert [step.start[0].item() for step in steps[5:]] == [0, 12, 13, 14, 15]
    (other,) = generate(model, ["a red apple"], method="plain")
    assert other.tokens[12:].tolist() != found[0].tokens[12:].tolist() and "forced_tokens" not in other.as_dict()


def test_a_cell_is_generated_if_the_mask_has_a_white_pixel_in_it(model: Model, files: dict[str, Path]) -> None:
    expected = tokens_of(model, files["picture"])
    pictures = generate(
        model, ["a red apple"] * 8, method="sjd-pac", init_image=files["picture"], mask_image=files["mask"], batch=3
    )
    found = [picture.tokens.tolist() for picture in pictures]
    assert all(tokens[:6] + tokens[7:] == expected[:6] + expected[7:] for tokens in found)
    assert len({tokens[6] for tokens in found}) > 1


def test_the_pipeline_takes_pictures(folder: Path, model: Model, files: dict[str, Path]) -> None:
    pipe = LanternPipeline.from_pretrained(folder)
    with Image.open(files["picture"]) as picture, Image.open(files["mask"]) as mask:
        found: Any = pipe("a red apple", generator=0, init_image=picture, mask_image=mask.convert("RGB"), method="sam")
    (expected,) = generate(
        model, ["a red apple"], method="plain", init_image=files["picture"], mask_image=files["mask"]
    )
    assert found.tokens[0].flatten().tolist() == expected.tokens.tolist()
    assert found.stats[0]["forced_tokens"] == 15
    message = "the init image is of type int, wanted a file or a PIL image"
    refused(pipe, "a red apple", init_image=3, keep_rows=1, error=TypeError, match=message)


def test_the_command_keeps_rows(folder: Path, files: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    words = ["--init-image", str(files["picture"]), "--keep-rows", "2", "--method", "gumbel-jacobi"]
    found = figures(capsys, str(folder), *words, "--out", str(tmp_path / "made.png"))
    assert found["forced_tokens"] == found["pictures"][0]["forced_tokens"] == found["tokens"] == 8
    with Image.open(tmp_path / "made.png") as picture:
        assert picture.info["forced_tokens"] == "8"


def test_arguments_that_do_not_fit_are_refused(folder: Path, files: dict[str, Path], capsys: Capture) -> None:
    picture, mask = (str(files[name]) for name in ("picture", "mask"))
    black = files["mask"].with_name("black.png")
    Image.new("L", (8, 8)).save(black)
    for arguments, message in (
        (["--init-image", picture], "takes the number of rows to keep or a mask: give one of them"),
        (["--init-image", picture, "--keep-rows", "1", "--mask", mask], "give one of them"),
        (["--keep-rows", "1"], "belong to an init image"),
        (["--init-image", picture, "--keep-rows", "4"], "rows to keep is 4, wanted a whole number from 1 to 3"),
        (["--init-image", str(files["wide"]), "--keep-rows", "1"], "wide.png has 8x6 pixels, wanted 8x8"),
        (["--init-image", picture, "--mask", str(files["wide"])], "the mask"),
        (["--init-image", picture, "--mask", str(black)], "the mask has no white pixel"),
        (["--init-image", str(files["text"]), "--keep-rows", "1"], "cannot read the init image"),
        (["--init-image", "none.png", "--keep-rows", "1"], "cannot read the init image none.png"),
    ):
        code = command.main(["--model", str(folder), "--prompt", "a red apple", *arguments])
        assert message in refusal(capsys, code)


def test_a_model_without_a_vq_encoder_is_refused(folder: Path, files: dict[str, Path]) -> None:
    without = load_model(folder, parts=("text",))
    with pytest.raises(ValueError, match="no VQ encoder, which an init image needs"):
        generate(without, ["a red apple"], with_pixels=False, init_image=files["picture"], keep_rows=1)
