"""The emoji training set: every kind of image, held-out cells, and archives that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lantern.training.data import Prepared
from lantern.training.stages import read_config
from recipes.emoji import packages as emoji
from recipes.emoji.captions import check_reserved, read_reserved, words_of
from recipes.emoji.compositing import on_white
from recipes.emoji.dataset import EmojiConfig, prepare
from recipes.emoji.packages import read_concepts
from tests.training.drawings import archive, disc, encoded

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "emoji" / "configs"
CONCEPTS = {
    "1F34E": "red apple",
    "1F431": "cat face",
    "1F697": "car",
    "26F5": "boat : dinghy",
    "1F347": "grapes @plural",
}


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
def config(tmp_path: Path) -> EmojiConfig:
    (tmp_path / "concepts.txt").write_text("".join(f"{code} {name}\n" for code, name in CONCEPTS.items()))
    (tmp_path / "synonyms.json").write_text(json.dumps([{"prompt": "a kitty", "concept": "cat face"}]))
    values = {"concepts": ["concepts.txt"], "reserved": "synonyms.json", "colours": 9, "counts": 6, "pairs": 4}
    (tmp_path / "data.json").write_text(json.dumps(values | {"mirrors": True, "shifts": 1, "held_out": 0.3}))
    return read_config(EmojiConfig, tmp_path / "data.json")


def test_emoji_preparation_makes_every_kind_and_reads_back(packages: Path, config: EmojiConfig, tmp_path: Path) -> None:
    summary = prepare(config, out=tmp_path / "out", packages=packages)
    prepared = Prepared.open(tmp_path / "out")
    pictures = prepared.images()
    assert summary.counts["kind"]["colour"] == 9
    assert summary.counts["kind"]["count"] == 6
    assert summary.counts["kind"]["pair"] == 4
    assert [r.image for r in prepared.records] == list(range(summary.records))
    assert pictures.shape == (summary.records, 3, 64, 64)
    assert [r.kind for r in prepared.records[:15]] == ["plain"] * 15
    assert {p["licence"] for p in summary.packages} == {"MIT", "Apache-2.0"}


def test_preparation_is_a_function_of_its_config(packages: Path, config: EmojiConfig, tmp_path: Path) -> None:
    first = prepare(config, out=tmp_path / "one", packages=packages)
    again = prepare(config, out=tmp_path / "two", packages=packages)
    other = prepare(replace(config, seed=1), out=tmp_path / "two", packages=packages)
    assert first == again
    assert first.sha256 != other.sha256


def test_reserved_words_never_reach_a_caption(packages: Path, config: EmojiConfig, tmp_path: Path) -> None:
    prepare(config, out=tmp_path / "out", packages=packages)
    words = {w for r in Prepared.open(tmp_path / "out").records for text, _ in r.captions for w in words_of(text)}
    assert "pet" in words and "fruit" in words
    assert not words & {"kitty", "kitties"}


def test_held_out_cells_leave_two_styles_and_feed_no_composite(
    packages: Path, config: EmojiConfig, tmp_path: Path
) -> None:
    prepare(config, out=tmp_path / "out", packages=packages)
    records = Prepared.open(tmp_path / "out").records
    held = {(r.concepts[0], r.style) for r in records if r.kind == "plain" and r.split == "heldout"}
    assert held and len({name for name, _ in held}) == len(held)
    assert not held & {(name, r.style) for r in records if r.split == "train" for name in r.concepts}
    assert not held & {(name, r.style) for r in records if r.kind != "plain" for name in r.concepts}


def test_a_wrong_archive_is_refused_in_one_line(packages: Path, config: EmojiConfig, tmp_path: Path) -> None:
    (packages / emoji.PACKAGES["3d"].file_name).write_bytes(b"not this")
    with pytest.raises(ValueError, match=r"sha256 is .* wanted .*delete the file") as caught:
        prepare(config, out=tmp_path / "out", packages=packages)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


def test_without_npm_the_missing_archive_is_named(
    packages: Path, config: EmojiConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = emoji.PACKAGES["noto"].file_name
    (packages / name).unlink()
    monkeypatch.setattr(emoji.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=f"{name} is missing and npm is not installed"):
        prepare(config, out=tmp_path / "out", packages=packages)


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
    config = read_config(EmojiConfig, CONFIGS / "data-emoji.json")
    assert config.source == "emoji"
    assert all(path.is_file() for path in (*config.concepts, config.reserved))


@pytest.mark.parametrize("values", [{}, {"concepts": ["x"], "pairs": -1}, {"concepts": ["x"], "styles": ["oil"]}])
def test_wrong_configs_are_refused_in_one_line(values: dict, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        read_config(EmojiConfig, tmp_path / "c.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["1F34E", "apple", "1F34E apple @loud", "1F34E apple\n1F34E pear"])
def test_malformed_concept_lists_name_their_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text(line)
    with pytest.raises(ValueError, match=r"c\.txt:\d"):
        read_concepts(tmp_path / "c.txt")


def test_transparent_colours_do_not_bleed_into_edges() -> None:
    picture = disc((255, 255, 255), 256)
    picture[picture[..., 3] == 0, :3] = 0
    sampled = emoji.rasterise(encoded(picture), 64, is_vector=False)
    assert on_white(sampled).min() >= 254
