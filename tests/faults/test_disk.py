"""Read-only places and full disks: one line, exit code 1, and finished images are kept."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lantern.cli import command as shared

FOUR = ("-n", "4", "--batch", "2", "--method", "plain")


def test_a_full_disk_keeps_earlier_pictures(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    save, count = Image.Image.save, [0]

    def fill(self: Image.Image, path: Path, **others: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            path.write_bytes(b"\x89PNG")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(self, path, **others)

    monkeypatch.setattr(Image.Image, "save", fill)
    tokens = tmp_path / "t.json"
    code, out, error = run(*FOUR, "--out", tmp_path / "out", "--json", "--tokens", tokens)
    found = json.loads(out)
    lost = tmp_path / "out" / "a-red-apple-plain-fp32-g3-seed0-2.png"
    assert code == 1 and error == f"lantern: error: {lost}: No space left on device\n"
    assert sorted(map(str, (tmp_path / "out").iterdir())) == sorted(found["paths"]) and len(found["paths"]) == 2
    assert len(json.loads(tokens.read_text())) == 2 and found["stopped"].endswith("No space left on device")


def test_unwritable_tokens_leave_the_pictures(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, encoding: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    code, out, error = run(*FOUR, "--out", tmp_path / "out", "--tokens", tmp_path / "t.json")
    assert code == 1 and error == f"lantern: error: {tmp_path}/t.json: No space left on device\n"
    assert len(out.split()) == len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize("option", ["--out", "--tokens"])
def test_a_read_only_folder_is_refused_at_once(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    # permissions do not bind the superuser, who may be running this
    monkeypatch.setattr(shared.os, "access", lambda path, mode: Path(path) != locked)
    monkeypatch.setattr("lantern.generation.generator.generate", lambda *_, **__: pytest.fail("something was made"))
    path = locked / "deep" / "x" if option == "--out" else locked / "t.json"
    assert run(option, path) == (1, "", f"lantern: error: {locked}: cannot be written to\n")
    assert not list(locked.iterdir())
