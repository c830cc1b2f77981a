"""Read-only places and full disks: one line, exit code 1, and finished images are kept."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lantern.cli import command as shared
from lantern.cli.generate import main
from tests.tiny_folder import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy")


def arguments(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    given = ["--model", str(folder), "--prompt", "a red apple", "-n", "4", "--batch", "2", "--method", "plain"]
    return [*given, "--out", str(tmp_path / "out"), *more]


def test_a_full_disk_keeps_and_reports_earlier_pictures(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert main(arguments(folder, tmp_path, "--json", "--tokens", str(tokens))) == 1
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    lost = tmp_path / "out" / "a-red-apple-plain-fp32-g3-seed0-2.png"
    assert seen.err == f"lantern: error: {lost}: No space left on device\n"
    assert sorted(map(str, (tmp_path / "out").iterdir())) == sorted(found["paths"]) and len(found["paths"]) == 2
    assert len(json.loads(tokens.read_text())) == 2 and found["stopped"].endswith("No space left on device")


def test_codes_that_cannot_be_written_leave_the_pictures(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lantern.core.io.atomic_write", full)
    assert main(arguments(folder, tmp_path, "--tokens", str(tmp_path / "t.json"))) == 1
    seen = capsys.readouterr()
    assert seen.err == f"lantern: error: {tmp_path}/t.json: No space left on device\n"
    assert len(seen.out.split()) == len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize("option", ["--out", "--tokens"])
def test_a_read_only_folder_is_refused_before_anything_is_made(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    # permissions do not bind the superuser, who may be running this
    monkeypatch.setattr(shared.os, "access", lambda path, mode: Path(path) != locked)
    monkeypatch.setattr("lantern.generation.generator.generate", lambda *_, **__: pytest.fail("something was made"))
    path = locked / "deep" / "x" if option == "--out" else locked / "t.json"
    assert main(["--model", str(folder), "--prompt", "a red apple", option, str(path)]) == 1
    assert capsys.readouterr().err == f"lantern: error: {locked}: cannot be written to\n"
    assert not list(locked.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_closed_output_is_one_line_and_exit_1() -> None:
    code = """
import sys
from lantern.cli.command import Command, run_command
sys.exit(run_command(Command("talk", "", lambda parser: None, lambda args: print("x", flush=True)), []))
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr == "lantern: error: No space left on device\n"
