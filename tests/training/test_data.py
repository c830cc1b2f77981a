import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lantern.training import emoji
from lantern.training.captions import (
    article,
    base_name,
    check_reserved,
    count_captions,
    pair_captions,
    plain_captions,
    plural,
    read_reserved,
    words_of,
)
from lantern.training.compositing import copies, find_colour, on_white, recolour, to_hsv, to_rgb
from lantern.training.data import DataConfig, Prepared, prepare, share_of
from lantern.training.emoji import Concept, read_concepts

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "lantern" / "training" / "configs"
CONCEPTS = {
    "1F34E": "red apple",
    "1F431": "cat face",
    "1F697": "car",
    "26F5": "boat : dinghy",
    "1F347": "grapes @plural",
}


def disc(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size]
    inside = (rows - size / 2) ** 2 + (columns - size / 2) ** 2 < (size / 3) ** 2
    picture = np.zeros((size, size, 4), np.uint8)
    picture[inside] = (*colour, 255)
    return picture


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def archive(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of the real layout with a red disc for every concept, known by their real names and new hashes."""
    pytest.importorskip("resvg_py")
    folder = tmp_path / "packages"
    folder.mkdir()
    circle = b'<circle cx="16" cy="16" r="11" fill="#d22"/>'
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">' + circle + b"</svg>"
    codes = [code.lower() for code in CONCEPTS]
    files = {
        "3d": {f"package/assets/{c}.webp": encoded(disc((220, 30, 30), 256), "WEBP") for c in codes},
        "flat": {f"package/assets/{c}.svg": svg for c in codes},
        "noto": {f"package/img/google/64/{c}-fe0f.png": encoded(disc((220, 30, 30))) for c in codes},
        "labels": {"package/en/data.json": json.dumps([
            {"hexcode": "1F34E", "emoji": "A", "tags": ["fruit", "kitty snack"]},
            {"hexcode": "1F431", "emoji": "B", "tags": ["kitty", "pet"]},
        ]).encode()},
        "keywords": {"package/dist/emoji-en-US.json": json.dumps({"A": ["healthy"]}).encode()},
    }  # fmt: skip
    for name, package in emoji.PACKAGES.items():
        digest = archive(folder / package.file_name, files[name])
        monkeypatch.setitem(emoji.PACKAGES, name, replace(package, sha256=digest))
    return folder


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "concepts.txt").write_text("".join(f"{code} {name}\n" for code, name in CONCEPTS.items()))
    (tmp_path / "synonyms.json").write_text(json.dumps([{"prompt": "a kitty", "concept": "cat face"}]))
    values = {"concepts": ["concepts.txt"], "reserved": "synonyms.json", "colours": 9, "counts": 6, "pairs": 4}
    (tmp_path / "data.json").write_text(json.dumps(values | {"mirrors": True, "shifts": 1, "held_out": 0.3}))
    return DataConfig.load(tmp_path / "data.json")


def test_emoji_preparation_makes_every_kind_and_reads_back(packages: Path, config: DataConfig, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = prepare(config, out=tmp_path / "out", packages=packages, progress=lambda *step: seen.append(step))
    prepared = Prepared.open(tmp_path / "out")
    pictures = prepared.images()
    assert summary.counts["kind"]["colour"] == 9
    assert summary.counts["kind"]["count"] == 6
    assert summary.counts["kind"]["pair"] == 4
    assert [r.image for r in prepared.records] == list(range(summary.records))
    assert pictures.shape == (summary.records, 3, 64, 64)
    assert all((prepared.image(i) == pictures[i]).all() for i in (0, summary.records - 1))
    assert [r.kind for r in prepared.records[:15]] == ["plain"] * 15
    assert len(seen) == summary.records
    assert {p["licence"] for p in summary.packages} == {"MIT", "Apache-2.0"}


def test_preparation_is_a_function_of_its_config(packages: Path, config: DataConfig, tmp_path: Path) -> None:
    first = prepare(config, out=tmp_path / "one", packages=packages)
    again = prepare(config, out=tmp_path / "two", packages=packages)
    other = prepare(replace(config, seed=1), out=tmp_path / "two", packages=packages)
    assert first == again
    assert first.sha256 != other.sha256


def test_reserved_words_never_reach_a_caption(packages: Path, config: DataConfig, tmp_path: Path) -> None:
    prepare(config, out=tmp_path / "out", packages=packages)
    words = {w for r in Prepared.open(tmp_path / "out").records for text, _ in r.captions for w in words_of(text)}
    assert "pet" in words and "fruit" in words
    assert not words & {"kitty", "kitties"}


def test_held_out_cells_leave_two_styles_and_feed_no_composite(
    packages: Path, config: DataConfig, tmp_path: Path
) -> None:
    prepare(config, out=tmp_path / "out", packages=packages)
    records = Prepared.open(tmp_path / "out").records
    held = {(r.concepts[0], r.style) for r in records if r.kind == "plain" and r.split == "heldout"}
    assert held and len({name for name, _ in held}) == len(held)
    assert not held & {(name, r.style) for r in records if r.split == "train" for name in r.concepts}
    assert not held & {(name, r.style) for r in records if r.kind != "plain" for name in r.concepts}


def test_a_wrong_archive_is_refused_in_one_line(packages: Path, config: DataConfig, tmp_path: Path) -> None:
    (packages / emoji.PACKAGES["3d"].file_name).write_bytes(b"not this")
    with pytest.raises(ValueError, match=r"sha256 is .* wanted .*delete the file") as caught:
        prepare(config, out=tmp_path / "out", packages=packages)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


def test_without_npm_the_missing_archive_is_named(
    packages: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = emoji.PACKAGES["noto"].file_name
    (packages / name).unlink()
    monkeypatch.setattr(emoji.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=f"{name} is missing and npm is not installed"):
        prepare(config, out=tmp_path / "out", packages=packages)


def test_a_reserved_word_in_a_name_is_an_error() -> None:
    check_reserved(["red apple"], frozenset({"kitty"}))
    with pytest.raises(ValueError, match="'kitty toy' holds \\['kitty'\\]"):
        check_reserved(["kitty toy"], frozenset({"kitty"}))


def test_committed_concepts_and_prompts_fit_together() -> None:
    core = read_concepts(CONFIGS / "concepts-core.txt")
    wide = read_concepts(CONFIGS / "concepts-wide.txt")
    prompts = ROOT / "assets" / "prompts"
    reserved = read_reserved(prompts / "synonyms.json")
    check_reserved([n.name for c in (*core, *wide) for n in (c, *c.other_names)], reserved)
    names = {concept.name for concept in core}
    assert {entry["concept"] for entry in json.loads((prompts / "synonyms.json").read_text())} <= names
    assert len({c.hexcode for c in (*core, *wide)}) == len(core) + len(wide)
    assert (prompts / "concepts.txt").read_text().split("\n")[:-1] == sorted(names)
    assert len((prompts / "contact_sheet.txt").read_text().splitlines()) == 64


def test_the_committed_config_loads() -> None:
    config = DataConfig.load(CONFIGS / "data-emoji.json")
    assert config.source == "emoji"
    assert all(Path(path).is_file() for path in (*config.concepts, config.reserved))


@pytest.mark.parametrize(
    "values",
    [
        {"source": "hub"},
        {"size": 0},
        {"size": True},
        {"held_out": "x"},
        {"colour": 1},
        {"concepts": ["x"], "pairs": -1},
        {"source": "folder"},
        [],
    ],
)
def test_wrong_configs_are_refused_in_one_line(values: object, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        DataConfig.load(tmp_path / "c.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["1F34E", "apple", "1F34E apple @loud", "1F34E apple\n1F34E pear"])
def test_malformed_concept_lists_name_their_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text(line)
    with pytest.raises(ValueError, match=r"c\.txt:\d"):
        read_concepts(tmp_path / "c.txt")


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("red apple", "red apples"),
        ("cup of coffee", "cups of coffee"),
        ("mouse", "mice"),
        ("computer mouse", "computer mice"),
        ("sheep", "sheep"),
        ("cherry", "cherries"),
        ("key", "keys"),
        ("fox", "foxes"),
        ("knife", "knives"),
        ("face with mask", "faces with mask"),
        ("snowman", "snowmen"),
    ],
)
def test_plurals(one: str, many: str) -> None:
    assert plural(one) == many


def test_articles_go_by_sound() -> None:
    names = ("apple", "unicorn", "hourglass", "urn", "house", "umbrella")
    assert [article(n).split()[0] for n in names] == ["an", "a", "an", "an", "a", "an"]


def test_captions_say_what_a_person_types() -> None:
    apple, cat = Concept("1", "red apple", ("apple",)), Concept("2", "cat")
    plain = dict(plain_captions(apple, "3d", ("fruit",), colour="red"))
    assert {"red apple", "a red apple", "3d red apple", "an apple", "a 3d style red apple"} <= set(plain)
    assert sum(plain.values()) == pytest.approx(1, abs=0.01)
    assert "two red apples" in dict(count_captions(apple, "flat", 2, colour=None))
    assert "three flat blue apples" in dict(count_captions(apple, "flat", 3, colour="blue"))
    assert "a red apple and a cat" in dict(pair_captions(apple, cat, "noto"))
    assert base_name("red apple") == "apple" and base_name("orange") == "orange"


def test_a_marked_synonym_changes_its_article() -> None:
    coffee = Concept("1", "cup of coffee", ("~coffee",))
    assert {"coffee", "3d coffee"} <= (captions := set(dict(plain_captions(coffee, "3d", (), colour=None))))
    assert "a coffee" not in captions


def test_recolouring_turns_the_object_and_leaves_white_alone() -> None:
    picture = disc((220, 30, 30))
    colouring = find_colour(picture)
    assert colouring is not None and colouring.name == "red" and colouring.is_vivid
    for colour in ("green", "blue", "yellow", "purple"):
        turned = find_colour(recolour(picture, colouring, colour))
        assert turned is not None and turned.name == colour
    half = picture.copy()
    half[:32, :, :3] = 255
    kept = recolour(half, colouring, "blue")
    assert (kept[:32] == half[:32]).all()


@given(st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=20))
def test_hsv_and_back_is_the_identity(colours: list[tuple[int, int, int]]) -> None:
    picture = np.array([colours], np.uint8)
    assert np.abs(to_rgb(to_hsv(picture)).astype(int) - picture.astype(int)).max() <= 1


@pytest.mark.parametrize("number", [2, 3, 4])
def test_copies_show_as_many_separate_objects(number: int) -> None:
    ink = (copies(disc((0, 0, 200)), number).sum(-1) < 600).astype(int)
    regions, left = 0, ink.copy()
    while left.any():
        regions += 1
        stack = [tuple(np.argwhere(left)[0])]
        while stack:
            y, x = stack.pop()
            if 0 <= y < 64 and 0 <= x < 64 and left[y, x]:
                left[y, x] = 0
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    assert regions == number


def test_transparent_colours_do_not_bleed_into_edges() -> None:
    picture = disc((255, 255, 255), 256)
    picture[picture[..., 3] == 0, :3] = 0
    drawn = emoji.rasterise(encoded(picture), 64, is_vector=False)
    assert on_white(drawn).min() >= 254


def test_folder_source_counts_and_names_what_it_cannot_use(tmp_path: Path) -> None:
    data = tmp_path / "pictures"
    data.mkdir()
    for i in range(5):
        Image.new("RGB", (40, 20 + i), (i * 40, 0, 0)).save(data / f"{i}.jpg")
        (data / f"{i}.txt").write_text(f"picture {i}\nnumber {i}\n")
    (data / "broken.png").write_bytes(b"x")
    (data / "broken.txt").write_text("broken")
    Image.new("RGB", (9, 9)).save(data / "silent.png")
    config = DataConfig(source="folder", path=str(data), size=32)
    summary = prepare(config, out=tmp_path / "out", packages=tmp_path)
    prepared = Prepared.open(tmp_path / "out")
    assert summary.records == 5 and summary.num_skipped == 2
    assert {entry.split(":")[0] for entry in summary.skipped} == {"broken.png", "silent.png"}
    assert prepared.images().shape == (5, 3, 32, 32)
    assert [text for text, _ in prepared.records[2].captions] == ["picture 2", "number 2"]


def test_class_folders_are_captions(tmp_path: Path) -> None:
    for label in ("red_fox", "owl"):
        (tmp_path / "in" / label).mkdir(parents=True)
        Image.new("RGBA", (30, 50)).save(tmp_path / "in" / label / "1.webp")
    config = DataConfig(source="classes", path=str(tmp_path / "in"), size=16)
    prepare(config, out=tmp_path / "out", packages=tmp_path)
    prepared = Prepared.open(tmp_path / "out")
    assert [r.concepts for r in prepared.records] == [("owl",), ("red fox",)]
    assert "a red fox" in dict(prepared.records[1].captions)
    assert (prepared.images() == 255).all()


def test_webdataset_shards_take_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    picture = encoded(np.full((8, 8, 3), 7, np.uint8))
    files = {
        "a.png": picture,
        "a.txt": b"first",
        "b.json": b'{"caption": "second"}',
        "b.jpg": picture,
        "c.png": picture,
    }
    archive(tmp_path / "in" / "0.tar", files)
    archive(
        tmp_path / "in" / "1.tar", {"x/d.webp": encoded(np.zeros((9, 5, 3), np.uint8), "WEBP"), "x/d.txt": b"third"}
    )
    config = DataConfig(source="webdataset", path=str(tmp_path / "in"), size=8)
    summary = prepare(config, out=tmp_path / "out", packages=tmp_path)
    texts = [r.captions[0][0] for r in Prepared.open(tmp_path / "out").records]
    assert texts == ["first", "second", "third"]
    assert summary.skipped == ("0.tar/c: no caption",)


def test_no_usable_picture_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.png").write_bytes(b"x")
    for source, wanted in (("folder", "no usable picture"), ("classes", "no usable"), ("webdataset", "no tar file")):
        config = DataConfig(source=source, path=str(tmp_path / "in"))
        with pytest.raises(ValueError, match=wanted):
            prepare(config, out=tmp_path / "out", packages=tmp_path)
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="no prepared data"):
        prepare(DataConfig(source="folder", path="x"), out=tmp_path, packages=tmp_path)
    with pytest.raises(ValueError, match="holds no prepared data"):
        Prepared.open(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@given(st.text())
def test_shares_lie_in_the_unit_interval(key: str) -> None:
    assert 0 <= share_of(key) < 1
