"""Manifests: entries are kept, incomplete lines are dropped, other fingerprints are rejected."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lantern.eval.json_lines import JsonLines
from lantern.eval.protocols.generation import Entry, read_entries
from lantern.generation.images import Statistics

HERE = {"weights": {"model": "a"}, "config": {"batch": 1}, "versions": {"torch": "2"}}
FIGURES = {
    "method": "plain",
    "is_exact": True,
    "tokens": 16,
    "steps": 16,
    "accepted": [],
    "reached": [],
    "relaxed": 0.0,
    "total_variation": 0.0,
    "total_variation_max": 0.0,
    "latent_distance": None,
    "seconds": {"decode": 0.5},
}


def entry(number: int, size: int = 10) -> Entry:
    return Entry(number, size, "s" * 64, "t" * 64, FIGURES)


def recorded(folder: Path, *numbers: int) -> Path:
    with JsonLines(folder / "manifest-1-of-1.jsonl", HERE) as manifest:
        for number in numbers:
            manifest.append(asdict(entry(number)))
    return manifest.path


def test_recorded_entries_are_read_back(tmp_path: Path) -> None:
    recorded(tmp_path, 0, 2)
    assert read_entries(tmp_path, HERE) == {0: entry(0), 2: entry(2)}
    figures = read_entries(tmp_path)[0].figures()
    assert isinstance(figures, Statistics) and figures.tokens_per_step == 1.0 and figures.accepted == ()


@pytest.mark.parametrize("left", range(1, 200, 23))
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, left: int) -> None:
    path = recorded(tmp_path, 0, 1)
    whole = path.read_bytes()
    end = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: end + left])
    assert set(read_entries(tmp_path, HERE)) == {0}
    recorded(tmp_path, 1)
    assert path.read_bytes() == whole


def test_an_incomplete_header_is_rewritten(tmp_path: Path) -> None:
    path = recorded(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    assert read_entries(tmp_path, HERE) == {}
    recorded(tmp_path, 0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": {"model": "other"}}, r"weights\.model a, now it is other: use another --out"),
        ({"config": {"batch": "other"}}, r"config\.batch 1, now it is other"),
        ({"versions": {"torch": "other"}}, r"versions\.torch 2, now it is other"),
        ({"weights": {"model": "a", "policy": "p"}}, r"weights\.policy none, now it is p"),
    ],
)
def test_another_fingerprint_is_rejected_by_its_difference(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = recorded(tmp_path, 0)
    for read in (lambda: JsonLines(path, HERE | changed), lambda: read_entries(tmp_path, HERE | changed)):
        with pytest.raises(ValueError, match=f"begun with {message}"):
            read()


def test_tuples_and_lists_are_the_same_to_a_fingerprint(tmp_path: Path) -> None:
    JsonLines(tmp_path / "manifest-1-of-1.jsonl", HERE | {"sizes": (1, 2)}).close()
    assert read_entries(tmp_path, HERE | {"sizes": [1, 2]}) == {}


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"id": 3}\n'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = recorded(tmp_path, 0)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match=r"manifest-1-of-1\.jsonl, line 3 is .*delete that line"):
        read_entries(tmp_path)


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path, 0)
    before = path.read_bytes()
    with JsonLines(path, HERE) as manifest:
        monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match=r"No space left on device.*manifest-1-of-1\.jsonl"):
            manifest.append(asdict(entry(1)))
        monkeypatch.undo()
        assert path.read_bytes() == before
        manifest.append(asdict(entry(1)))
    assert set(read_entries(tmp_path)) == {0, 1}


def test_the_difference_that_is_named_shows_in_the_message(tmp_path: Path) -> None:
    long = "x" * 60
    was, now = ({"drafter": long + name, "name": name} for name in ("sjd", "scd"))
    with JsonLines(tmp_path / "lines", was):
        pass
    with pytest.raises(ValueError, match="was begun with name sjd, now it is scd"):
        JsonLines(tmp_path / "lines", now)
