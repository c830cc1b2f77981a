"""Folders, classes and shards become training data; wrong configs are refused."""

import errno
import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from lantern.core.config import build_config
from lantern.core.process import Stopped, Stopping
from lantern.training import data
from lantern.training.data import (
    RECORDS,
    SUMMARY,
    DataConfig,
    Prepared,
    Record,
    Summary,
    held_or_trained,
    prepare,
    unpack,
    write_prepared,
)
from lantern.training.features import Conditions, encode_captions
from lantern.training.stages import read_config
from tests.cli.calls import Capture
from tests.refusals import refused
from tests.tiny_folder import tiny_text_encoder
from tests.training.drawings import archive, encoded, noisy


def made(place: Path, files: dict[str, Any], source: str = "classes", **settings: Any) -> tuple[Prepared, Summary]:
    """Prepare the files of a folder at `place / "in"`, of bytes, text or images, into `place / "out"`."""
    for name, content in files.items():
        path = place / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(content) if isinstance(content, bytes) else content.save(path)
    given = {"source": source, "path": place / "in", "size": 8} | settings
    summary = prepare(build_config(DataConfig, given, source="x"), out=place / "out")
    return Prepared.open(place / "out"), summary


def test_wrong_configs_are_refused_in_one_line(tmp_path: Path) -> None:
    wrong = ({"source": "hub"}, {"size": 0}, {"size": True}, {"held_out": "x"}, {"colour": 1}, {"concepts": ["x"]}, [])
    for values in wrong:
        (tmp_path / "c.json").write_text(json.dumps(values))
        refused(read_config, DataConfig, tmp_path / "c.json")


def test_folder_source_lists_what_it_leaves_out(tmp_path: Path) -> None:
    files = {f"{i}.jpg": Image.new("RGB", (40, 20 + i), (i * 40, 0, 0)) for i in range(5)}
    files |= {f"{i}.txt": f"picture {i}\nnumber {i}\n" for i in range(5)}
    files |= {"broken.png": b"x", "broken.txt": "broken", "silent.png": Image.new("RGB", (9, 9))}
    prepared, summary = made(tmp_path, files, "folder", size=32)
    assert summary.records == 5 and summary.num_skipped == 2
    assert {entry.split(":")[0] for entry in summary.skipped} == {"broken.png", "silent.png"}
    assert "2 inputs left out, listed in summary.json, first broken.png: not an image" in str(summary)
    assert summary.skipped[1] == "silent.png: no text file"
    assert prepared.images().shape == (5, 3, 32, 32)
    assert [text for text, _ in prepared.records[2].captions] == ["picture 2", "number 2"]


def test_a_signal_while_data_are_replaced_leaves_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, {"owl/0.png": Image.new("RGB", (8, 8))})
    remove = shutil.rmtree

    def interrupted(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        if folder == tmp_path / "out":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(data.shutil, "rmtree", interrupted)
    with pytest.raises(Stopped), Stopping():
        made(tmp_path, {"owl/1.png": Image.new("RGB", (8, 8))})
    assert len(Prepared.open(tmp_path / "out").records) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_captions_have_no_byte_order_mark_and_other_encodings_are_left_out(tmp_path: Path) -> None:
    texts = {"a": "a fox".encode("utf-8-sig"), "b": "a fox".encode("utf-16"), "c": "a café".encode("latin-1")}
    files = {f"{name}.txt": text for name, text in texts.items()}
    files |= {f"{name}.png": encoded(np.full((8, 8, 3), 7, np.uint8)) for name in "abc"}
    archive(tmp_path / "shard.tar", dict(sorted(files.items())))
    for source, path, lack in (
        ("folder", tmp_path / "in", "its text is not UTF-8"),
        ("webdataset", tmp_path / "shard.tar", "no caption in UTF-8"),
    ):
        prepared, summary = made(tmp_path, files, source, path=path)
        assert prepared.records[0].captions == (("a fox", 1.0),)
        assert [text.split(": ")[1] for text in summary.skipped] == [lack] * 2
        with pytest.raises(ValueError, match=f"holds the images of {path}, got .*: choose another folder"):
            made(tmp_path, files, path=tmp_path)
        shutil.rmtree(tmp_path / "out")


def test_a_torn_shard_and_a_folder_of_other_files_are_refused(tmp_path: Path) -> None:
    archive(tmp_path / "s.tgz", {"a.png": np.random.default_rng(0).bytes(1 << 12), "a.txt": b"first"})
    config = DataConfig(source="webdataset", path=tmp_path / "s.tgz", size=8)
    for torn in ((tmp_path / "s.tgz").read_bytes()[:-100], b"torn"):
        (tmp_path / "s.tgz").write_bytes(torn)
        refused(prepare, config, out=tmp_path / "out", match=r"s\.tgz: not a complete tar file")
    (tmp_path / "thesis.txt").write_text("mine")
    assert "no prepared data" in refused(prepare, DataConfig(source="folder", path=Path("x")), out=tmp_path)
    assert "holds no prepared data" in refused(Prepared.open, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    (tmp_path / SUMMARY).write_text('{"sha256": ""}')
    wrong = '{"image": 0, "captions": [[null, 1.0]], "kind": "plain", "concepts": [], "style": "", "split": "train"}'
    for damaged in ("3", "[" * 100_000, wrong):
        (tmp_path / RECORDS).write_text(damaged)
        assert "holds no prepared data" in refused(Prepared.open, tmp_path)


def test_captions_that_cleaning_empties_are_left_out_of_training(tmp_path: Path, capsys: Capture) -> None:
    texts = [("a red apple on a wide table", "download.jpg"), ("download.jpg",), ("a cat",)]
    captions = [tuple((text, 1 / len(some)) for text in some) for some in texts]
    records = [Record(i, some, "plain", (), "", "train") for i, some in enumerate(captions)]

    def conditions(some: list[Record], name: str) -> Conditions:
        return encode_captions(tiny_text_encoder(), Prepared(tmp_path, some, ""), tmp_path / name, slots=6)

    for _ in range(2):  # encoded, and read from the cache
        kept = conditions(records, "all.safetensors").readable(records)
        found = {one.image: [text for text, _ in one.captions] for one in kept}
        assert found == {0: [texts[0][0]], 2: ["a cat"]}
        warned = capsys.readouterr().err
        assert "warning: 1 of 3 captions are empty once cleaned, such as 'download.jpg'" in warned
        assert "warning: 1 of 3 captions fill all 6 slots; longer ones are cut: raise slots" in warned
    assert "1 of 1 captions are empty once cleaned" in refused(conditions, records[1:2], "none.safetensors")


def test_class_folders_are_captions_of_their_whole_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(strange := tmp_path / "strange.dds")
    content = bytearray(strange.read_bytes())
    content[80] = 10  # the flags of its pixels: Pillow raises NotImplementedError
    files: dict[str, Any] = {f"{label}/1.webp": Image.new("RGBA", (30, 50)) for label in ("red_fox", "owl")}
    files |= {"grey/16_bits.png": Image.fromarray(np.full((8, 8), 128 << 8, np.uint16)), "owl/2.png": bytes(content)}
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to("large")  # stays a link
    prepared, summary = made(tmp_path, files)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "large" / SUMMARY).exists()
    assert summary.skipped == ("owl/2.png: not an image that can be read",)
    assert [r.concepts for r in prepared.records] == [("grey",), ("owl",), ("red fox",)]
    assert "a red fox" in dict(prepared.records[2].captions)
    assert [picture.unique().tolist() for picture in prepared.images()] == [[128], [255], [255]]


def test_figures_of_training_images_are_not_called_held_out_without_a_warning(capsys: Capture) -> None:
    assert held_or_trained([3], [5, 6]).tolist() == [3] and not capsys.readouterr().err
    assert held_or_trained([], [5, 6]).tolist() == [5, 6]
    assert "warning: no image is held out" in capsys.readouterr().err


def test_mirrors_of_training_pictures_are_added(tmp_path: Path) -> None:
    files: dict[str, Any] = {f"sky/{i}.jpg": noisy((40, 60, 220), i) for i in range(24)}
    prepared, summary = made(tmp_path, files | {"sky/torn.jpg": b"no image"}, size=16, held_out=0.2, mirrors=True)
    assert summary.skipped == ("sky/torn.jpg: not an image that can be read",)
    pictures, held = prepared.images(), [r for r in prepared.records if r.split == "heldout"]
    assert held and all(record.variant == "original" for record in held)
    mirrors = [record.image for record in prepared.records if record.variant == "mirror"]
    assert len(mirrors) == 24 - len(held) and len(prepared.records) == 24 + len(mirrors)
    for number in mirrors:
        assert (pictures[number] == pictures[number - 1].flip(2)).all()
        assert prepared.records[number].concepts == prepared.records[number - 1].concepts


def test_webdataset_shards_take_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    picture, wide = encoded(np.full((8, 8, 3), 7, np.uint8)), encoded(np.zeros((9, 5, 3), np.uint8), "WEBP")
    files = {"a.png": picture, "a.txt": b"first", "b.json": b'{"caption": "second"}', "b.jpg": picture}
    deep = {"c.png": picture, "c.json": b"[" * 100_000}
    archive(tmp_path / "in" / "0.tar", files | deep)
    archive(tmp_path / "in" / "1.tar", {"x/d.webp": wide, "x/d.txt": b"third"})
    prepared, summary = made(tmp_path, {}, "webdataset")
    assert [r.captions[0][0] for r in prepared.records] == ["first", "second", "third"]
    assert summary.skipped == ("0.tar/c: no caption in UTF-8",)


def test_no_usable_picture_or_path_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    messages = {"folder": "no usable image", "classes": "x.png: in no folder of a class", "webdataset": "no tar file"}
    for source, expected in messages.items():
        refused(made, tmp_path, {"x.png": b"x"}, source, match=expected)
    message = "path is empty, wanted the folder data to read: give --path"
    refused(prepare, DataConfig(), out=tmp_path / "out", match=message)
    assert not list(tmp_path.glob("*out*"))


def test_decoded_pictures_are_cached_in_one_file_that_callers_cannot_change(tmp_path: Path) -> None:
    prepared, _ = made(tmp_path, {"owl/1.png": Image.new("RGB", (16, 16), (9, 8, 7))}, size=16)
    first, kept = prepared.images(), tmp_path / "out" / "pictures.tar"
    kept = kept.rename(tmp_path / "pictures.tar")
    first += 1
    assert prepared.images()[0, :, 0, 0].tolist() == [9, 8, 7]
    cache = tmp_path / "out" / "pictures.npy"
    cache.write_bytes(b"torn")
    refused(prepared.images, match=r"pictures\.npy cannot be read .*remove it")
    np.save(cache, np.zeros((1, 3, 16, 16)))
    refused(prepared.images, match=r"pictures\.npy cannot be read .*4 axes of float64, wanted 4 of uint8.*remove it")
    cache.unlink()
    kept = kept.rename(tmp_path / "out" / "pictures.tar")
    whole = kept.read_bytes()
    archive(tmp_path / "two.tar", {f"{side}.png": encoded(np.zeros((side, side, 3), np.uint8)) for side in (8, 16)})
    for torn in (b"torn", whole[:600], whole.replace(b"PNG", b"GNP"), (tmp_path / "two.tar").read_bytes()):
        kept.write_bytes(torn)
        refused(prepared.images, match=r"pictures\.tar is damaged .*prepare it again")
    for torn in (b"torn", whole[:600]):
        kept.write_bytes(torn)
        refused(unpack, tmp_path / "out", tmp_path / "files", match=r"pictures\.tar is damaged .*prepare it again")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_pictures_of_a_read_only_folder_are_decoded_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    prepared, _ = made(tmp_path, {"owl/1.png": Image.new("RGB", (8, 8), (9, 8, 7))})
    monkeypatch.setattr(data, "atomic_write", Mock(side_effect=OSError(number, "no")))
    assert prepared.images()[0, :, 0, 0].tolist() == [9, 8, 7] and not (tmp_path / "out" / "pictures.npy").exists()
    monkeypatch.setattr(data, "atomic_write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    refused(prepared.images, error=OSError, match="full")


def test_number_of_cores_does_not_change_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(i: int) -> tuple[np.ndarray, Record] | str:
        record = Record(image=0, captions=((f"c{i}", 1.0),), kind="plain", concepts=(), style="", split="train")
        return "left out" if i % 7 == 3 else (np.full((8, 8, 3), i, np.uint8), record)

    digests = set()
    for cores in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        jobs = (partial(job, i) for i in range(40))
        summary = write_prepared(tmp_path / str(cores), jobs, DataConfig(), origin="x")
        assert summary.skipped == ("left out",) and summary.records == 34
        records = Prepared.open(tmp_path / str(cores)).records
        assert [r.captions[0][0] for r in records] == [f"c{i}" for i in range(40) if i % 7 != 3]
        assert [r.image for r in records] == list(range(34))
        digests.add(summary.sha256)
    assert len(digests) == 1
