"""The emoji training set: its images, captions and held-out cells, and archives that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern.training.data import Prepared
from lantern.training.stages import read_config
from recipes.emoji import captions
from recipes.emoji import packages as emoji
from recipes.emoji.compositing import copies, find_colour, on_white, recolour, to_hsv, to_rgb
from recipes.emoji.dataset import EmojiConfig, prepare
from recipes.emoji.packages import Concept, read_concepts
from tests.refusals import refused
from tests.training.drawings import disc, encoded, packed

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "emoji" / "configs"
CONCEPTS = {"1F34E": "red apple", "1F431": "cat face", "1F697": "car"}
CONCEPTS |= {"26F5": "boat : dinghy", "1F347": "grapes @plural"}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of the real layout with a red disc for every concept, known by their real names and new hashes."""
    pytest.importorskip("resvg_py")
    circle = b'<circle cx="16" cy="16" r="11" fill="#d22"/>'
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">' + circle + b"</svg>"
    codes = [code.lower() for code in CONCEPTS]
    files = {
        "3d": {f"assets/{c}.webp": encoded(disc((220, 30, 30), 256), "WEBP") for c in codes},
        "flat": {f"assets/{c}.svg": svg for c in codes},
        "noto": {f"img/google/64/{c}-fe0f.png": encoded(disc((220, 30, 30))) for c in codes},
        "labels": {"en/data.json": json.dumps([
            {"hexcode": "1F34E", "emoji": "A", "tags": ["fruit", "kitty snack"]},
            {"hexcode": "1F431", "emoji": "B", "tags": ["kitty", "pet"]},
        ])},
        "keywords": {"dist/emoji-en-US.json": '{"A": ["healthy"]}'},
    }  # fmt: skip
    return packed(tmp_path / "packages", files, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> EmojiConfig:
    (tmp_path / "concepts.txt").write_text("".join(f"{code} {name}\n" for code, name in CONCEPTS.items()))
    (tmp_path / "synonyms.json").write_text(json.dumps([{"prompt": "a kitty", "concept": "cat face"}]))
    values = {"concepts": ["concepts.txt"], "reserved": "synonyms.json", "colours": 9, "counts": 6, "pairs": 4}
    (tmp_path / "data.json").write_text(json.dumps(values | {"mirrors": True, "shifts": 1, "held_out": 0.3}))
    return read_config(EmojiConfig, tmp_path / "data.json")


def test_every_kind_is_made_of_training_cells_without_reserved_words_as_a_function_of_the_config(
    packages: Path, config: EmojiConfig, tmp_path: Path
) -> None:
    summary = prepare(config, out=tmp_path / "out", packages=packages)
    prepared = Prepared.open(tmp_path / "out")
    records = prepared.records
    assert [summary.counts["kind"][kind] for kind in ("colour", "count", "pair")] == [9, 6, 4]
    assert [r.image for r in records] == list(range(summary.records))
    assert prepared.images().shape == (summary.records, 3, 64, 64)
    assert [r.kind for r in records[:15]] == ["plain"] * 15
    assert {p["licence"] for p in summary.packages} == {"MIT", "Apache-2.0"}
    words = {w for r in records for text, _ in r.captions for w in captions.words_of(text)}
    assert {"pet", "fruit"} <= words and not words & {"kitty", "kitties"}
    # held-out cells leave two styles and feed no composite
    held = {(r.concepts[0], r.style) for r in records if r.kind == "plain" and r.split == "heldout"}
    assert held and len({name for name, _ in held}) == len(held)
    assert not held & {(name, r.style) for r in records if r.split == "train" for name in r.concepts}
    assert not held & {(name, r.style) for r in records if r.kind != "plain" for name in r.concepts}
    assert prepare(config, out=tmp_path / "again", packages=packages) == summary
    assert prepare(replace(config, seed=1), out=tmp_path / "again", packages=packages).sha256 != summary.sha256


def test_wrong_and_missing_archives_are_refused_in_one_line(
    packages: Path, config: EmojiConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emoji.shutil, "which", lambda _: None)
    wrong = {"noto": "is missing and npm is not installed", "3d": ": sha256 is .* wanted .*delete the file"}
    for name, message in wrong.items():
        path = packages / emoji.archives()[name].file_name
        content = path.read_bytes()
        path.unlink() if name == "noto" else path.write_bytes(b"not this")
        named = f"{path}{'' if name == '3d' else ' '}{message}"
        refused(prepare, config, out=tmp_path / "out", packages=packages, match=named)
        assert not list(tmp_path.glob("*out*"))
        path.write_bytes(content)


def test_committed_concepts_and_prompts_fit_together() -> None:
    config, prompts = read_config(EmojiConfig, CONFIGS / "data-emoji.json"), ROOT / "assets" / "prompts"
    assert config.reserved is not None and config.reserved.resolve() == prompts / "synonyms.json"
    # it refuses a thing that is in two lists
    every = read_concepts(CONFIGS / "concepts-core.txt", CONFIGS / "concepts-wide.txt")
    captions.check_reserved(
        [n.name for c in every for n in (c, *c.other_names)], captions.read_reserved(config.reserved)
    )
    names = {concept.name for concept in read_concepts(CONFIGS / "concepts-core.txt")}
    assert {entry["concept"] for entry in json.loads((prompts / "synonyms.json").read_text())} <= names
    assert (prompts / "concepts.txt").read_text().split("\n")[:-1] == sorted(names)
    assert len((prompts / "contact_sheet.txt").read_text().splitlines()) == 64


def test_wrong_configs_concept_lists_and_names_are_refused_in_one_line(tmp_path: Path) -> None:
    for values in ({}, {"concepts": ["x"], "pairs": -1}, {"concepts": ["x"], "styles": ["oil"]}):
        (tmp_path / "c.json").write_text(json.dumps(values))
        refused(read_config, EmojiConfig, tmp_path / "c.json")
    for lines in ("1F34E", "apple", "1F34E apple @loud", "1F34E apple\n1F34E pear"):
        (tmp_path / "c.txt").write_text(lines)
        refused(read_concepts, tmp_path / "c.txt", match=r"c\.txt:\d")
    captions.check_reserved(["red apple"], frozenset({"kitty"}))
    refused(captions.check_reserved, ["kitty toy"], frozenset({"kitty"}), match="'kitty toy' holds \\['kitty'\\]")


def test_transparent_colours_do_not_bleed_into_edges() -> None:
    picture = disc((255, 255, 255), 256)
    picture[picture[..., 3] == 0, :3] = 0
    sampled = emoji.rasterise(encoded(picture), 64, is_vector=False)
    assert on_white(sampled).min() >= 254


def test_plurals_and_articles() -> None:
    many = {"red apple": "red apples", "cup of coffee": "cups of coffee", "face with mask": "faces with mask"}
    many |= {"mouse": "mice", "computer mouse": "computer mice", "sheep": "sheep", "cherry": "cherries", "key": "keys"}
    many |= {"fox": "foxes", "knife": "knives", "snowman": "snowmen"}
    assert {one: captions.plural(one) for one in many} == many
    names = ("apple", "unicorn", "hourglass", "urn", "house", "umbrella")
    assert [captions.article(n).split()[0] for n in names] == ["an", "a", "an", "an", "a", "an"]


def test_captions_are_phrases_that_a_person_types() -> None:
    apple, cat = Concept("1", "red apple", ("apple",)), Concept("2", "cat")
    plain = dict(captions.plain_captions(apple, "3d", ("fruit",), colour="red"))
    assert {"red apple", "a red apple", "3d red apple", "an apple", "a 3d style red apple"} <= set(plain)
    assert sum(plain.values()) == pytest.approx(1, abs=0.01)
    assert "two red apples" in dict(captions.count_captions(apple, "flat", 2, colour=None))
    assert "three flat blue apples" in dict(captions.count_captions(apple, "flat", 3, colour="blue"))
    assert "a red apple and a cat" in dict(captions.pair_captions(apple, cat, "noto"))
    assert captions.base_name("red apple") == "apple" and captions.base_name("orange") == "orange"
    coffee = Concept("1", "cup of coffee", ("~coffee",))
    assert {"coffee", "3d coffee"} <= (found := set(dict(captions.plain_captions(coffee, "3d", (), colour=None))))
    assert "a coffee" not in found


def test_recolouring_changes_the_object_and_not_white() -> None:
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
    ndimage = pytest.importorskip("scipy.ndimage")
    assert ndimage.label(copies(disc((0, 0, 200)), number).sum(-1) < 600)[1] == number
