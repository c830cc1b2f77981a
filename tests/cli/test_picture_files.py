"""Picture files of `lantern-generate`: names, overwriting, formats, sizes and contact sheets."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lantern.cli import generate
from lantern.cli.generate import main
from lantern.generation.file_names import FIELDS, Destination, compact, destination, fill, slug
from lantern.generation.images import enlarge, save_image, to_image
from tests.cli.calls import Capture, made, refusal
from tests.tiny_folder import save_tiny_model

pytestmark = pytest.mark.usefixtures("elsewhere")
PROMPT = "a red apple"


def names(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_calls_that_differ_write_different_files(model: str) -> None:
    calls: list[tuple[str, ...]] = [
        (),
        ("--method", "plain"),
        ("--method", "lantern", "--k", "4"),
        ("--method", "lantern", "--k", "4", "--delta", "0.2"),
        ("--dtype", "bf16"),
        ("--guidance", "4"),
        ("--seed", "1"),
        ("--temperature", "0.9"),
        ("--top-k", "3"),
        ("-n", "2", "--seed", "2"),
        ("--compare",),
        ("--grid", "-n", "2"),
    ]
    for call in calls:
        assert made(model, *call, "--quiet") == 0, call
    for prompt in ("a red apple!", "a-red-apple", "\u0633", "x" * 70, "x" * 71):
        assert main(["--model", model, "--prompt", prompt, "--quiet"]) == 0
    assert len(names()) == len(calls) + 1 + 5
    assert "a-red-apple-lantern-delta0.2-k4-fp32-g3-seed0-0.png" in names()
    assert "a-red-apple-plain-and-eagle1-fp32-g3-seed0-0.png" in names()


def test_nothing_is_overwritten_unless_requested(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(model) == 0
    [path] = Path().iterdir()
    path.write_bytes(b"own")
    capsys.readouterr()
    with monkeypatch.context() as patched:
        from lantern.generation import generator

        patched.setattr(generator, "generate", None)  # a refusal comes before any decoding
        assert f"{path} exists: give --overwrite" in refusal(capsys, made(model))
    assert path.read_bytes() == b"own"
    assert made(model, "--overwrite") == 0 and path.read_bytes() != b"own"


def test_files_named_by_the_user_are_replaced_and_numbered_ones_are_not(model: str, capsys: Capture) -> None:
    for name in ("x.png", "t.json", "x-1.png"):
        Path(name).write_bytes(b"own")
    assert made(model, "--out", "x.png", "--tokens", "t.json") == 0
    assert Path("x.png").read_bytes() != b"own" and json.loads(Path("t.json").read_text())
    capsys.readouterr()
    assert "x-1.png exists" in refusal(capsys, made(model, "--out", "x.png", "-n", "2"))
    assert names() == ["t.json", "x-1.png", "x.png"] and Path("x-1.png").read_bytes() == b"own"


def test_a_template_names_the_files_of_a_folder(model: str) -> None:
    assert made(model, "--name", "{prompt}-{method}-g{guidance}-seed{seed:03d}", "-n", "2", "--out", "o") == 0
    assert names("o") == ["a-red-apple-eagle1-g3-seed000.2.png", "a-red-apple-eagle1-g3-seed000.png"]
    assert made(model, "--name", "{image}.jpg", "-n", "2", "--out", "p") == 0
    assert names("p") == ["0.jpg", "1.jpg"]


def test_names_do_not_depend_on_the_choice_of_auto(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for times in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0, 4: 1.0}):
        monkeypatch.setattr("lantern.generation.generator.pass_times", lambda *_, times=times, **__: times)
        assert made(model, "--method", "auto", "--overwrite", "--out", "o") == 0
    assert names("o") == ["a-red-apple-auto-fp32-g3-seed0-0.png"]


def test_every_field_has_a_value(model: str) -> None:
    assert made(model, "--name", " ".join(f"{{{name}}}" for name in FIELDS), "--weights", "bf16") == 0
    assert names() == ["a-red-apple eagle1  toy eager bf16  3 1 12 1 0 0.png"]


def test_help_lists_the_fields(capsys: Capture) -> None:
    assert main(["--help-all"]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert all(name in out for name in FIELDS)


def test_different_texts_have_different_short_names() -> None:
    texts = ["a cat", "a cat!", "a-cat", "a  cat", "\u732b", "\u72ac", "", "c" * 61, "c" * 62, "caf\u00e9", "cafe"]
    assert len({slug(text) for text in texts}) == len(texts)
    assert slug("A red apple") == "a-red-apple"
    assert compact({"lambda_": 2.0, "k": 10}) == "k10-lambda2" and compact({}) == ""
    assert compact({"tree": "[[0]]"}) != compact({"tree": "[[1]]"})


def test_equal_names_of_a_run_are_numbered() -> None:
    place = destination(Path("o"), template="{prompt}")
    assert [path.name for path in place.paths([{"prompt": "a"}] * 3)] == ["a.png", "a.2.png", "a.3.png"]
    assert fill("{prompt}-{settings}-{seed}", {"prompt": "a", "settings": "", "seed": 3}) == "a-3"


@pytest.mark.parametrize(
    ("options", "form", "name"),
    [
        (["--format", "jpeg"], "JPEG", "a-red-apple-eagle1-fp32-g3-seed0-0.jpg"),
        (["--format", "webp", "--quality", "20"], "WEBP", "a-red-apple-eagle1-fp32-g3-seed0-0.webp"),
        (["--out", "x.jpeg"], "JPEG", "x.jpeg"),
        (["--out", "x.webp"], "WEBP", "x.webp"),
    ],
)
def test_lossy_formats_have_the_metadata_too(model: str, options: list[str], form: str, name: str) -> None:
    assert made(model, *options) == 0
    with Image.open(name) as image:
        assert (image.format, image.size) == (form, (8, 8))
        comment = image.getexif().get_ifd(0x8769)[0x9286]
    facts = json.loads(comment.removeprefix(b"ASCII\0\0\0"))
    assert (facts["prompt"], facts["Source"], facts["method"]) == (PROMPT, "AI generated", "eagle1")
    assert b"trainedAlgorithmicMedia" in Path(name).read_bytes()


def test_quality_changes_the_size_of_the_file(tmp_path: Path) -> None:
    import torch

    noise = to_image(torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8))
    sizes = []
    for quality in (10, 90):
        save_image(noise, tmp_path / "x.jpg", {}, quality=quality)
        sizes.append((tmp_path / "x.jpg").stat().st_size)
    assert sizes[0] < sizes[1]


def test_pictures_are_enlarged_by_the_scale_of_the_model(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "m", generation={"guidance": 3.0, "scale": 4}))
    for call, side in ((("--scale", "1"), 8), ((), 32), (("--scale", "2", "--resample", "nearest"), 16)):
        assert made(folder, *call, "--out", f"{side}.png") == 0
        with Image.open(f"{side}.png") as image:
            assert image.size == (side, side)
            assert image.info.get("scale") == (None if side == 8 else str(side // 8))
    raw, enlarged = Image.open("8.png"), Image.open("16.png")
    assert raw.resize((16, 16), Image.Resampling.NEAREST).tobytes() == enlarged.tobytes()


def test_the_embedded_model_writes_256_pixels() -> None:
    from lantern.core.io import read_config
    from lantern.core.places import embedded_model
    from lantern.models.folder import read_index

    folder = embedded_model()
    side = read_config(folder / "transformer")["block_size"] ** 0.5
    downsample = 2 ** (len(read_config(folder / "vqvae")["encoder_ch_mult"]) - 1)
    assert side * downsample * read_index(folder)["generation"]["scale"] == 256


def test_metrics_read_the_pixels_of_the_model(model: str) -> None:
    from lantern.eval.metrics.pictures import Stream, raw

    for name, call in (
        ("raw", ["--scale", "1"]),
        ("near", ["--scale", "3", "--resample", "nearest"]),
        ("soft", ["--scale", "3"]),
    ):
        assert made(model, *call, "--out", f"{name}.png") == 0

    def pixels(name: str) -> Any:
        [batch] = Stream([Path(f"{name}.png")], {"x": raw})
        return batch.inputs["x"]

    assert pixels("near").equal(pixels("raw"))
    with pytest.raises(ValueError, match="soft.png was enlarged 3 times.*--scale 1"):
        pixels("soft")


@pytest.mark.parametrize("ending", ["jpg", "webp"])
def test_metrics_refuse_enlarged_lossy_pictures_and_read_their_prompts(model: str, ending: str) -> None:
    from lantern.eval.metrics.pictures import Stream, raw

    def batch() -> Any:
        return next(iter(Stream([Path(f"x.{ending}")], {"x": raw})))

    assert made(model, "--scale", "1", "--out", f"x.{ending}") == 0
    assert batch().prompts == (PROMPT,) and batch().inputs["x"].shape == (1, 3, 8, 8)
    for resample in ("nearest", "lanczos"):  # compression changes the pixels of "nearest"
        assert made(model, "--scale", "3", "--resample", resample, "--out", f"x.{ending}", "--overwrite") == 0
        with pytest.raises(ValueError, match=rf"x.{ending} was enlarged 3 times.*--scale 1"):
            batch()


@pytest.mark.parametrize("comment", [None, b"", b"ASCII\0\0\0a cat", b"[1]", b'{"scale": 2}', "text"])
def test_comments_of_other_programs_are_no_facts(comment: Any, tmp_path: Path) -> None:
    from lantern.generation.images import read_facts

    exif = Image.Exif()
    if comment is not None:
        exif.get_ifd(0x8769)[0x9286] = comment
    Image.new("RGB", (4, 4)).save(tmp_path / "x.jpg", exif=exif)
    with Image.open(tmp_path / "x.jpg") as image:
        assert read_facts(image) == {}
    (tmp_path / "x.jpg").write_bytes(
        (tmp_path / "x.jpg").read_bytes().replace(b"II*", b"XX*").replace(b"MM\0*", b"XX*")
    )
    with Image.open(tmp_path / "x.jpg") as image:
        assert read_facts(image) == {}


def test_enlarging_keeps_shape_and_refuses_other_scales() -> None:
    import torch

    pixels = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    assert enlarge(pixels, 1) is pixels
    for resample in ("nearest", "lanczos"):
        assert enlarge(pixels, 3, resample).shape == (2, 12, 12, 3)
    for scale, resample in ((0, "nearest"), (17, "nearest"), (2, "cubic"), (1.5, "nearest")):
        with pytest.raises(ValueError, match="wanted"):
            enlarge(pixels, scale, resample)  # type: ignore[arg-type]


def test_a_sheet_holds_all_pictures(model: str, capsys: Capture) -> None:
    assert made(model, "--grid", "3", "-n", "5", "--scale", "2", "--out", "sheet.png", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert names() == ["sheet.png"] and found["paths"] == ["sheet.png"]
    assert [one["path"] for one in found["pictures"]] == ["sheet.png"] * 5
    with Image.open("sheet.png") as image:
        assert image.size == (8 + 3 * 24, 8 + 2 * 24)
        assert image.info["layout"] == "sheet of 3 columns" and image.info["prompt"] == PROMPT
    assert made(model, "--out", "0.png", "--scale", "2") == 0
    with Image.open("sheet.png") as image, Image.open("0.png") as first:
        assert image.crop((8, 8, 24, 24)).tobytes() == first.tobytes()


def test_a_sheet_of_several_prompts_has_labels(model: str, capsys: Capture) -> None:
    prompts = ["--prompt", "a \u0633\u064a\u0628 \U0001f34e", "--prompt", "\ud83d apple"]
    assert made(model, *prompts, "--grid", "--out", "o") == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name.endswith("-grid3.png")
    with Image.open(path) as image:
        assert image.size == (8 + 2 * 16, 8 + 2 * (16 + 24)) and "prompt" not in image.info
        assert len(image.crop((0, 17, 40, 40)).convert("L").getcolors() or []) > 1


def test_tokens_can_go_to_standard_output(model: str, capsys: Capture) -> None:
    assert made(model, "--tokens", "-", "--out", "x.png", "--quiet") == 0
    assert len(json.loads(capsys.readouterr().out)) == 4 and names() == ["x.png"]


def test_destinations_are_files_or_folders() -> None:
    Path("folder.png").mkdir()
    assert destination(Path("folder.png")) == Destination(Path("folder.png"), False)
    assert destination(None) == Destination(Path("."), False)
    assert destination(Path("a/x.JPG")).is_file and not destination(Path("a/x")).is_file


def test_the_model_folder_gets_a_scale(tmp_path: Path) -> None:
    from lantern.cli.main import main as lantern
    from lantern.models.folder import read_index

    folder = save_tiny_model(tmp_path / "m")
    assert lantern(["assemble", str(folder), "--scale", "4"]) == 0
    assert read_index(folder)["generation"]["scale"] == 4
    assert generate.main(["--model", str(folder), "--prompt", PROMPT, "--out", "x.png"]) == 0
    with Image.open("x.png") as image:
        assert image.size == (32, 32)


def test_words_of_training_captions_are_listed_where_they_are_recorded(tmp_path: Path, capsys: Capture) -> None:
    from lantern.models.folder import write_words

    folder = save_tiny_model(tmp_path / "m")
    capsys.readouterr()
    line = refusal(capsys, main(["--model", str(folder), "--list-words"]))
    assert "words.txt is missing: the words of the training captions are not recorded" in line
    write_words(folder, ["A red apple", "a well-known cat's caf\u00e9, two"])
    assert main(["--model", str(folder), "--list-words"]) == 0
    assert capsys.readouterr().out.split() == ["a", "apple", "caf\u00e9", "cat's", "red", "two", "well-known"]


def test_names_are_listed_as_far_as_their_images_are_recognised(tmp_path: Path, capsys: Capture) -> None:
    from lantern.models.folder import NAMES_NAME, RECOGNISED_NAME, write_names

    folder = save_tiny_model(tmp_path / "m")
    capsys.readouterr()
    line = refusal(capsys, main(["--model", str(folder), "--list-names"]))
    assert "names.txt is missing: the names of what this model generates are not recorded" in line
    for name, names in ((NAMES_NAME, ["dog", "red apple"]), (RECOGNISED_NAME, ["red apple"])):
        write_names(folder / name, names)
        assert main(["--model", str(folder), "--list-names"]) == 0
        assert capsys.readouterr().out.splitlines() == names
