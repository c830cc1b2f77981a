"""Figures of folders of images, by command and function; and how images are found, read and kept in order."""

import hashlib
import json
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.main import main
from lantern.eval.metrics import inception
from lantern.eval.metrics.judges import extract
from lantern.eval.metrics.moments import Moments
from lantern.eval.metrics.pictures import AHEAD, find_pictures, raw, stream
from lantern.eval.metrics.quality import Figure, Options, fid_of_shards, measure
from lantern.eval.protocols.protocol import resizing
from tests.cli.calls import Capture, one_line
from tests.eval.tiny_metrics import FEATURES, save_pictures, save_tiny_clip, save_tiny_inception
from tests.eval.workers import Patch
from tests.refusals import refused


def run(*words: object) -> int:
    return main(["eval", *map(str, words)])


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    return {"inception": save_tiny_inception(tmp_path / "tiny.pt")}


def test_every_figure_records_how_it_was_computed(tmp_path: Path, weights: dict[str, Path]) -> None:
    paths = save_pictures(tmp_path / "a", 8)
    save_pictures(tmp_path / "b", 9, seed=1)
    metrics = ["kid", "fid", "precision", "recall", "density", "coverage"]
    found = measure(paths, tmp_path / "b", metrics, weights=weights, seed=3)
    assert list(found) == metrics
    for figure in found.values():
        assert figure.interval is not None and figure.interval[0] <= figure.value <= figure.interval[1]
        assert figure.interval_means.startswith("95 %") and "clean" in figure.resize
        assert "lantern " in figure.library and "clean-fid " in figure.library
        facts = (figure.weights, figure.images, figure.reference_images, figure.reference, figure.seed)
        assert facts == ("tiny.pt", 8, 9, "b", 3)
        digests = (figure.weights_sha256, figure.images_sha256, figure.reference_sha256)
        assert [len(digest) for digest in digests] == [64] * 3
    of_adm = measure(paths, tmp_path / "b", ["precision-legacy", "recall-legacy"], weights=weights)
    assert all(one.protocol.startswith("3 nearest") and "legacy" in one.resize for one in of_adm.values())


def test_networks_and_pictures_are_read_once(tmp_path: Path, weights: dict[str, Path], monkeypatch: Patch) -> None:
    ours, theirs = save_pictures(tmp_path / "a", 8), save_pictures(tmp_path / "b", 8, seed=1)
    load, read, loaded, opened = inception.load_inception, Path.read_bytes, list[object](), list[Path]()
    monkeypatch.setattr(inception, "load_inception", lambda *a, **k: loaded.append(a) or load(*a, **k))
    monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(self) or read(self))
    measure(ours, theirs, ["kid", "fid", "fid-legacy", "precision", "psnr"], weights=weights)
    images = [path for path in opened if path.suffix == ".png"]  # libraries read files of their own
    assert len(loaded) == 1 and sorted(images) == sorted([*ours, *theirs])


def test_clip_figures_name_protocol_prompts_and_cut_prompts(tmp_path: Path) -> None:
    paths = save_pictures(tmp_path / "a", 4, prompts=True)
    weights = {"clip": save_tiny_clip(tmp_path / "clip")}
    carried = measure(paths, None, ["clip", "clip-lantern"], weights=weights)
    given = measure(paths, None, ["clip"], prompts=[f"prompt {i}" for i in range(4)], weights=weights)
    assert carried["clip-lantern"].value != carried["clip"].value == given["clip"].value >= 0
    other = [f"prompt {i}" for i in (0, 1, 3, 2)]  # of the right images, not in the order of their names
    message = "^002.png is of 'prompt 2', not 'prompt 3': order --prompts by file names"
    refused(measure, paths, None, ["clip"], prompts=other, weights=weights, match=message)
    assert "torchmetrics" in carried["clip"].protocol
    assert "A photo depicts" in carried["clip-lantern"].protocol
    assert carried["clip"].prompts.startswith("from the image files (sha256 ")
    long = measure(paths, None, ["clip"], prompts=["word " * 99] * 4, weights=weights)
    assert long["clip"].warning == "4 prompts are truncated to 77 tokens"
    prompts = ["dog " * 75] * 4  # they fit without the prefix
    full = measure(paths, None, ["clip", "clip-lantern"], prompts=prompts, weights=weights)
    assert [full[name].warning for name in full] == ["", "4 prompts are truncated to 77 tokens"]


def test_equal_images_have_a_warning_and_no_distance_below_zero_and_psnr_leaves_them_out(
    tmp_path: Path, weights: dict[str, Path], capsys: Capture
) -> None:
    ours, theirs = save_pictures(tmp_path / "a", 8), save_pictures(tmp_path / "b", 8, seed=1)
    equal = measure(ours, tmp_path / "a", ["kid", "fid", "coverage"], weights=weights)
    assert {figure.warning for figure in equal.values()} == {"the reference has the same images"}
    assert 0 <= equal["fid"].value < 1e-6
    theirs[1].write_bytes(ours[1].read_bytes())
    found = measure(ours, theirs, ["psnr"])["psnr"]
    assert found.warning.startswith("1 images are equal")
    assert 0 < found.value < 40
    assert run(tmp_path / "a", "--reference", tmp_path / "a", "--metrics", "psnr", "--json") == 0
    shown, table = capsys.readouterr()
    assert "psnr                     inf " in table and json.loads(shown)["figures"]["psnr"]["value"] is None


def test_pictures_are_resized_as_a_protocol_does(tmp_path: Path, capsys: Capture) -> None:
    save_pictures(tmp_path / "a", 1)
    save_pictures(tmp_path / "b", 1, seed=1)
    with Image.open(tmp_path / "b" / "000.png") as image:
        image.resize((64, 32)).save(tmp_path / "b" / "000.png")
    how = (tmp_path / "a", "--reference", tmp_path / "b", "--metrics", "psnr", "--json")
    assert run(*how) == 2 and "wanted pairs of the same size" in capsys.readouterr().err
    assert run(*how, "--protocol", "coco2017-5k-longest") == 0
    assert "crop-lanczos to 256" in capsys.readouterr().out


def test_shards_merge_to_the_fid_of_one_run(tmp_path: Path, weights: dict[str, Path], capsys: Capture) -> None:
    paths = save_pictures(tmp_path / "a", 40)
    save_pictures(tmp_path / "b", 30, seed=1)
    kept = []
    for name, part in (("whole", paths), ("one", paths[:13]), ("two", paths[13:])):
        folder = tmp_path / name
        measure(part, tmp_path / "b", ["fid"], weights=weights, options=Options(moments=folder, batch=13))
        kept.append(folder / "pictures-inception-clean.safetensors")
    reference = tmp_path / "whole" / "reference-inception-clean.safetensors"
    whole, merged = fid_of_shards(kept[:1], reference), fid_of_shards(kept[1:], reference)
    assert merged.images == whole.images == 40
    assert merged.name == "fid" and "clean" in merged.resize and len(merged.weights_sha256) == 64
    assert merged.value == pytest.approx(whole.value, rel=1e-6)
    assert run(kept[0], "--reference", reference) == run(kept[0], "--reference", reference, "--metrics", "fid") == 0
    for word in ("--metrics kid fid", "--metrics nosuch", "--prompts x", "--weights clip=x", "--keep-moments x"):
        capsys.readouterr()
        assert run(kept[0], "--reference", reference, *word.split()) == 2
        assert word.split()[0].strip("-") in one_line(capsys)
    (npz := tmp_path / "reference.npz").touch()
    for other in (tmp_path / "b", npz):
        assert run(kept[0], "--reference", other) == 2
        assert f"got reference {other} for moments, wanted moments of it" in one_line(capsys)
    refused(fid_of_shards, [kept[1], kept[1]], reference, match="merge each set once")
    replace(Moments.load(reference), made_with="inception x legacy").save(reference)
    message = "made with .* clean' and with 'inception x legacy', wanted the same"
    refused(fid_of_shards, kept[:1], reference, match=message)
    how = Options(moments=tmp_path / "resized", before=resizing("crop-lanczos", 16), resized="crop-lanczos to 16")
    measure(paths, tmp_path / "b", ["fid"], weights=weights, options=how)
    resized = [how.moments / f"{role}-inception-clean.safetensors" for role in ("pictures", "reference")]
    assert fid_of_shards(resized[:1], resized[1]).resize.startswith("crop-lanczos to 16, then Pillow")
    refused(fid_of_shards, kept[:1], resized[1], match="and with .* crop-lanczos to 16 clean', wanted the same")
    refused(measure, paths, resized[1], ["fid"], weights=weights, match="crop-lanczos to 16 clean', wanted")


def test_reference_statistics_support_only_fid(tmp_path: Path, weights: dict[str, Path]) -> None:
    paths = save_pictures(tmp_path / "a", 5)
    path = tmp_path / "reference.npz"
    np.savez(path, mu=np.zeros(FEATURES), sigma=np.eye(FEATURES))
    found = measure(paths, path, ["fid"], weights=weights)["fid"]
    assert found.reference == "reference.npz" and "reference fixed" in found.interval_means
    assert found.as_dict()["reference_images"] is None
    assert found.interval is not None and found.interval[0] <= found.value <= found.interval[1]
    assert "does not name its network and resize" in found.warning
    refused(measure, paths, path, ["kid"], weights=weights, match="support only FID")
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"\0" * 64, b"\1" * 64)):
        path.write_bytes(damaged)
        refused(measure, paths, path, ["fid"], weights=weights, match="reference.npz has no mu and sigma")
    np.savez(path, mu=np.full(FEATURES, np.nan), sigma=np.eye(FEATURES))
    refused(measure, paths, path, ["fid"], weights=weights, match="reference.npz: tensor 'mu'")


def test_command_writes_what_it_prints(tmp_path: Path, weights: dict[str, Path], capsys: Capture) -> None:
    save_pictures(tmp_path / "a", 6)
    save_pictures(tmp_path / "b", 6, seed=1)
    out, named = tmp_path / "out.json", f"inception={weights['inception']}"
    assert run(tmp_path / "a", "--reference", tmp_path / "b", "--weights", named, "--json", "--out", out) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads(out.read_text())
    assert list(result["figures"]) == ["kid", "fid"]
    assert set(result["figures"]["fid"]) == {field.name for field in fields(Figure)}
    assert result["surroundings"]["torch"] == torch.__version__
    lines = captured.err.splitlines()
    assert lines[0].startswith("kid ") and lines[1].startswith("fid ")  # of few images KID is added, with a warning
    assert "warning" in lines[2] and "fewer than 2048" in result["figures"]["fid"]["warning"]


BAD = {
    "unknown metric": (["A", "--reference", "A", "--metrics", "fidd"], "did you mean 'fid'?"),
    "no reference": (["A"], "give them with --reference"),
    "no such folder": (["none"], "does not exist"),
    "empty folder": (["EMPTY", "--reference", "A"], "has no images"),
    "no prompts": (["A", "--metrics", "clip"], "000.png has no prompt in its file"),
    "another number of prompts": (["A", "--metrics", "clip", "--prompts", "PROMPTS"], "1 prompts for 3 images"),
    "pairs of two names": (["A", "--reference", "OTHER", "--metrics", "psnr"], "wanted equal numbers"),
    "pairs of two sizes": (["A", "--reference", "SMALL", "--metrics", "psnr"], "000.png is [3, 16, 16]: wanted"),
    "one image": (["A/000.png", "--reference", "A"], "kid: a set has 1 images, wanted at least 2"),
    "one image for FID": (["A/000.png", "--reference", "A", "--metrics", "fid"], "fid: a set has 1 images"),
    "few neighbours": (["A", "--reference", "A", "--metrics", "fid", "recall"], "recall: a set has 3 images, wanted"),
    "moments of no metric": (["A", "--metrics", "is", "psnr", "--keep-moments", "x", "--reference", "A"], "add fid"),
    "too few draws": (["A", "--reference", "A", "--draws", "1"], "draws is 1, wanted at least 20, or 0"),
    "unknown network": (["A", "--weights", "inceptio=x"], "did you mean 'inception'?"),
    "weights without path": (["A", "--weights", "clip"], "wanted NAME=PATH"),
    "moments beside images": (["MOMENTS", "A", "--reference", "A"], "is not a file of moments"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_gives_one_line(case: str, tmp_path: Path, capsys: Capture) -> None:
    words, expected = BAD[case]
    save_pictures(tmp_path / "A", 3)
    save_pictures(tmp_path / "OTHER", 2)
    save_pictures(tmp_path / "SMALL", 3, side=16)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "PROMPTS").write_text("one\n")
    (tmp_path / "MOMENTS.safetensors").write_bytes(b"")
    known = {path.stem: path for path in tmp_path.iterdir()}
    named = ["--weights", f"clip={save_tiny_clip(tmp_path / 'clip')}"] if "--metrics clip" in " ".join(words) else []
    capsys.readouterr()
    known["A/000.png"] = tmp_path / "A" / "000.png"
    assert run(*(known.get(word, word) for word in words), *named) == 2
    assert expected in one_line(capsys)


def test_batches_and_digests_keep_the_order(tmp_path: Path) -> None:
    paths, batches = save_pictures(tmp_path, 11, prompts=True), []
    for _ in range(2):
        batches = list(stream(paths, {"raw": raw}, batch=4))
        assert [(one.first, len(one.names)) for one in batches] == [(0, 4), (4, 4), (8, 3)]
        assert [name for one in batches for name in one.names] == [path.name for path in paths]
        assert [prompt for one in batches for prompt in one.prompts] == [f"prompt {i}" for i in range(11)]
        pixels = torch.cat([one.inputs["raw"] for one in batches])
        expected = torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths])
        assert torch.equal(pixels, expected)
    found = [digest for one in batches for digest in one.digests]
    assert found == [hashlib.sha256(path.read_bytes()).digest() for path in paths]
    seen, _ = extract(tmp_path / "features", ((paths, {}), ((), {})), {}, batch=2, is_quiet=True)
    assert seen[0].sha256 == hashlib.sha256(b"".join(found)).hexdigest()


def test_grey_of_16_bits_is_not_clipped(tmp_path: Path) -> None:
    grey = np.array([[0, 300], [40_000, 65_535]], dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    (batch,) = stream([tmp_path / "grey.png"], {"raw": raw}, batch=1)
    assert torch.equal(batch.inputs["raw"][0], torch.tensor(grey >> 8).to(torch.uint8).expand(3, 2, 2))


def test_only_a_few_batches_are_in_memory(tmp_path: Path) -> None:
    paths = save_pictures(tmp_path, 40)
    lock, prepared = threading.Lock(), 0

    def prepare(pixels: np.ndarray) -> torch.Tensor:
        nonlocal prepared
        with lock:
            prepared += 1
        return raw(pixels)

    for number, _ in enumerate(stream(paths, {"raw": prepare}, batch=2), start=1):
        assert prepared <= 2 * (number + AHEAD)
    assert prepared == 40


TORN = b"\x89PNG\r\n\x1a\n" + b"\0" * 40


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "its format is not recognised$"), (b"no image", "its format is not recognised$"), (TORN, ""), (None, "")],
)
def test_a_file_that_is_no_whole_picture_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "bad.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    refused(list, stream([path], {"raw": raw}), match=rf"bad.png is not a complete image: {reason}")


@pytest.mark.parametrize("batch", [1, 2])
def test_pictures_of_two_sizes_are_rejected_without_a_resize(tmp_path: Path, batch: int) -> None:
    one, other = (save_pictures(tmp_path / name, 1, side=side)[0] for name, side in (("a", 32), ("b", 16)))
    message = rf"^{other} is \[3, 16, 16\], {one} is \[3, 32, 32\]: wanted images of the same size$"
    refused(list, stream([one, other], {"raw": raw}, batch=batch), match=message)


def test_pictures_are_found_in_subfolders_by_name(tmp_path: Path) -> None:
    for name in ("b", "a/x", "a"):
        save_pictures(tmp_path / name, 2)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    found = [str(path.relative_to(tmp_path)) for path in find_pictures(tmp_path)]
    assert found == sorted(found) and len(found) == 6
    for number, path in zip((10, 9), find_pictures(tmp_path / "b"), strict=True):  # as LANTERN's code names them
        path.rename(path.with_name(f"prompt_{number}.png"))
    assert [path.name for path in find_pictures(tmp_path / "b")] == ["prompt_9.png", "prompt_10.png"]
