"""Picture files of `lantern-generate`: names, overwriting, formats, sizes and contact sheets."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lantern.cli.generate import main
from lantern.cli.main import main as lantern
from lantern.eval.metrics.pictures import raw, stream
from lantern.generation import images
from lantern.generation.images import FIELDS, FORMATS, compact, destination, read_facts, save_image, slug, to_image
from tests.cli.calls import Capture, figures, made, refusal
from tests.eval.workers import files_of_at_most

pytestmark = pytest.mark.usefixtures("elsewhere")
PROMPT = "a red apple"


def names(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_calls_that_differ_write_different_files(model: str, classes: str) -> None:
    calls = ["", "--method plain", "--method lantern --k 4", "--method lantern --k 4 --delta 0.2", "--dtype bf16"]
    calls += ["--guidance 4", "--seed 1", "--temperature 0.9", "--top-k 3", "-n 2 --seed 2", "--compare", "--grid -n 2"]
    for call in calls:
        assert made(model, *call.split(), "--quiet") == 0, call
    assert len(names()) == len(calls) + 1
    for made_of in ("eagle1", "lantern-delta0.2-k4", "plain-and-eagle1"):
        assert f"a-red-apple-{made_of}-fp32-g3-seed0-0.png" in names()
    assert main(["--model", classes, "--class-label", "7", "--out", "c", "--method", "eagle1"]) == 0
    assert names("c") == ["class-7-eagle1-fp32-g3-seed0-0.png"]


def test_only_files_that_are_named_are_replaced(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(model) == 0
    [path] = Path().iterdir()
    for name in (path, "x.png", "t.json", "x-1.png"):
        Path(name).write_bytes(b"own")
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("lantern.generation.generator.make_batches", None)  # a refusal comes before any decoding
        assert f"{path} exists: give --overwrite" in refusal(capsys, made(model))
        assert "x-1.png exists" in refusal(capsys, made(model, "--out", "x.png", "-n", "2"))
    assert made(model, "--out", "x.png", "--tokens", "t.json") == 0
    assert Path("x.png").read_bytes() != b"own" and json.loads(Path("t.json").read_text())
    assert path.read_bytes() == Path("x-1.png").read_bytes() == b"own"
    assert made(model, "--overwrite") == 0 and path.read_bytes() != b"own"


def test_a_file_that_another_run_wrote_meanwhile_is_not_replaced(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = images.save_image

    def late(image: Any, path: Path, *facts: Any, **how: Any) -> None:
        path.write_bytes(b"another run's")
        save(image, path, *facts, **how)

    monkeypatch.setattr(images, "save_image", late)
    assert made(model) == 1 and "0.png: another run wrote it meanwhile: give --overwrite" in capsys.readouterr().err
    [path] = Path().iterdir()
    assert path.read_bytes() == b"another run's"
    for replacing in (["--overwrite"], ["--out", "x.png"]):
        assert Path(figures(capsys, model, *replacing)["paths"][0]).read_bytes() != b"another run's"


def test_files_that_exist_are_kept_and_the_others_made(model: str, capsys: Capture) -> None:
    assert made(model, "-n", "3", "--out", "whole") == made(model, "--out", "o") == 0
    [kept] = Path("o").iterdir()
    kept.write_bytes(b"own")
    assert made(model, "-n", "3", "--out", "o", "--skip-existing", "--batch", "2") == 0
    assert kept.read_bytes() == b"own" and names("o") == names("whole")
    others = [name for name in names("o") if name != kept.name]
    assert all((Path("o") / name).read_bytes() == (Path("whole") / name).read_bytes() for name in others)
    capsys.readouterr()
    assert made(model, "-n", "3", "--out", "o", "--skip-existing") == 0
    assert capsys.readouterr().err == "lantern: all 3 images exist\n"
    assert figures(capsys, model, "-n", "3", "--out", "o", "--skip-existing")["paths"] == []
    for option in ("--overwrite", "--grid"):
        assert f"{option} is given" in refusal(capsys, made(model, "--out", "o", "--skip-existing", option))


def test_a_template_names_the_files_of_a_folder(model: str, capsys: Capture) -> None:
    assert made(model, "--name", "{prompt}-{method}-g{guidance}-seed{seed:03d}", "-n", "2", "--out", "o") == 0
    assert names("o") == ["a-red-apple-eagle1-g3-seed000.2.png", "a-red-apple-eagle1-g3-seed000.png"]
    assert made(model, "--name", "{image}.jpg", "-n", "2", "--out", "p") == 0
    assert names("p") == ["0.jpg", "1.jpg"]
    assert made(model, "--name", " ".join(f"{{{name}}}" for name in FIELDS), "--weights", "bf16", "--out", "q") == 0
    assert names("q") == ["a-red-apple eagle1  toy eager bf16  3 1 12 1 0 0.png"]
    capsys.readouterr()
    assert main(["--help-all"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIELDS)


def test_names_do_not_depend_on_the_choice_of_auto(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for times in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0, 4: 1.0}):
        monkeypatch.setattr("lantern.generation.choice.pass_times", lambda *_, times=times, **__: times)
        assert made(model, "--method", "auto", "--overwrite", "--out", "o") == 0
    assert names("o") == ["a-red-apple-auto-fp32-g3-seed0-0.png"]


def test_settings_have_a_short_name_and_destinations_are_files_or_folders() -> None:
    assert compact({"lambda_": 2.0, "k": 10}) == "k10-lambda2" and compact({}) == ""
    assert compact({"tree": "[[0]]"}) != compact({"tree": "[[1]]"}) and slug("A red apple") == "a-red-apple"
    assert len(set(map(slug, ("a red apple", "a red apple!", "a-red-apple", "\u0633", "x" * 70, "x" * 71)))) == 6
    Path("folder.png").mkdir()
    for out, is_file in ((None, False), (Path("folder.png"), False), (Path("a/x.JPG"), True), (Path("a/x"), False)):
        assert destination(out).is_file == is_file


@given(one=st.text(), other=st.text())
def test_short_names_are_safe_and_tell_texts_apart_but_for_case(one: str, other: str) -> None:
    assert 0 < len(slug(one)) < 80 and set(slug(one)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert slug(one) != slug(other) or one.lower() == other.lower()


def test_prompts_with_equal_file_names_do_not_overwrite_each_other(model: str) -> None:
    prompts = ["a cat", "a cat!", "A CAT", "a cat"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["--model", model, *arguments, "-n", "2", "--out", "here", "--method", "plain"]) == 0
    assert len(names("here")) == 8


@pytest.mark.parametrize(
    ("options", "form", "name"),
    [
        ("--format jpeg", "JPEG", "a-red-apple-eagle1-fp32-g3-seed0-0.jpg"),
        ("--format webp --quality 20", "WEBP", "a-red-apple-eagle1-fp32-g3-seed0-0.webp"),
        ("--out x.jpeg", "JPEG", "x.jpeg"),
    ],
)
def test_lossy_formats_have_the_metadata_too(model: str, options: str, form: str, name: str) -> None:
    assert made(model, *options.split()) == 0
    with Image.open(name) as image:
        assert (image.format, image.size) == (form, (8, 8))
        comment = image.getexif().get_ifd(0x8769)[0x9286]
    facts = json.loads(comment.removeprefix(b"ASCII\0\0\0"))
    assert (facts["prompt"], facts["Source"], facts["method"]) == (PROMPT, "AI generated", "eagle1")
    assert b"trainedAlgorithmicMedia" in Path(name).read_bytes()


@pytest.mark.parametrize("suffix", FORMATS)
def test_quality_changes_the_size_of_a_file_and_none_is_left_where_it_does_not_fit(suffix: str, tmp_path: Path) -> None:
    noise, path = to_image(torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8)), tmp_path / f"x{suffix}"
    sizes = []
    for quality in () if suffix == ".png" else (10, 90):
        save_image(noise, path, {}, quality=quality)
        sizes.append(path.stat().st_size)
        path.unlink()
    assert sizes == sorted(set(sizes))
    with files_of_at_most(1024), pytest.raises(OSError, match=rf"large.*x\{suffix}"):
        save_image(noise, path, {})
    assert not list(tmp_path.iterdir())


def test_pictures_are_enlarged_by_the_scale_of_the_model(copied: Path) -> None:
    folder = str(copied)
    assert lantern(["assemble", folder, "--scale", "4"]) == 0
    for call, side in ((("--scale", "1"), 8), ((), 32), (("--scale", "2", "--resample", "nearest"), 16)):
        assert made(folder, *call, "--out", f"{side}.png") == 0
        with Image.open(f"{side}.png") as image:
            assert image.size == (side, side)
            assert image.info.get("scale") == (None if side == 8 else str(side // 8))
    raw, enlarged = Image.open("8.png"), Image.open("16.png")
    assert raw.resize((16, 16), Image.Resampling.NEAREST).tobytes() == enlarged.tobytes()


@pytest.mark.parametrize("ending", ["png", "webp"])
def test_metrics_read_prompts_and_the_pixels_of_the_model(model: str, ending: str) -> None:
    def batch() -> Any:
        return next(iter(stream([Path(f"x.{ending}")], {"x": raw})))

    assert made(model, "--scale", "1", "--out", f"x.{ending}") == 0
    own = batch()
    assert own.prompts == (PROMPT,) and own.inputs["x"].shape == (1, 3, 8, 8)
    for resample in ("nearest", "lanczos"):
        assert made(model, "--scale", "3", "--resample", resample, "--out", f"x.{ending}", "--overwrite") == 0
        if (ending, resample) == ("png", "nearest"):  # other formats change the pixels by compression
            assert batch().inputs["x"].equal(own.inputs["x"])
        else:
            with pytest.raises(ValueError, match=rf"x.{ending} was enlarged 3 times.*--scale 1"):
                batch()


@pytest.mark.parametrize("comment", [None, b"", b"ASCII\0\0\0a cat", b"[1]", b'{"scale": 2}', "text"])
def test_comments_of_other_programs_are_no_facts(comment: Any, tmp_path: Path) -> None:
    exif, path = Image.Exif(), tmp_path / "x.jpg"
    if comment is not None:
        exif.get_ifd(0x8769)[0x9286] = comment
    Image.new("RGB", (4, 4)).save(path, exif=exif)
    for content in (path.read_bytes(), path.read_bytes().replace(b"II*", b"XX*").replace(b"MM\0*", b"XX*")):
        path.write_bytes(content)
        with Image.open(path) as image:
            assert read_facts(image) == {}


def test_a_sheet_holds_all_pictures(model: str, capsys: Capture) -> None:
    found = figures(capsys, model, "--grid", "3", "-n", "5", "--scale", "2", "--out", "sheet.png")
    assert names() == ["sheet.png"] and found["paths"] == ["sheet.png"]
    assert [one["path"] for one in found["pictures"]] == ["sheet.png"] * 5
    assert made(model, "--out", "0.png", "--scale", "2") == 0
    with Image.open("sheet.png") as image, Image.open("0.png") as first:
        assert image.size == (8 + 3 * 24, 8 + 2 * 24)
        assert image.info["layout"] == "sheet of 3 columns" and image.info["prompt"] == PROMPT
        assert image.crop((8, 8, 24, 24)).tobytes() == first.tobytes()


def test_a_sheet_of_several_prompts_has_labels_that_name_emoji(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sheet = list[str](), images.sheet
    monkeypatch.setattr(
        images, "sheet", lambda made, labels, **how: seen.extend(labels) or sheet(made, labels=labels, **how)
    )
    prompts = ["--prompt", "a \u0633\u064a\u0628 \U0001f436", "--prompt", "\ud83d apple"]
    assert made(model, *prompts, "--grid", "--out", "o") == 0
    assert seen == [PROMPT, "a \u0633\u064a\u0628 dog face", "\ud83d apple"]
    path = Path(capsys.readouterr().out.strip())
    assert path.name.endswith("-grid3.png")
    with Image.open(path) as image:
        assert image.size == (8 + 2 * 16, 8 + 2 * (16 + 24)) and "prompt" not in image.info
        assert len(image.crop((0, 17, 40, 40)).convert("L").getcolors() or []) > 1
