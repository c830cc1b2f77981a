"""Signals, full disks and read-only places: the exit code, no partial files, and finished images are reported."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lantern.cli import command as shared
from lantern.core.process import Stopped, Stopping
from lantern.generation import generator, images

ROOT = Path(__file__).resolve().parents[2]
FOUR = ("-n", 4, "--batch", 2, "--method", "plain")
ENDS = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (143, "terminated"),
    signal.SIGHUP: (129, "terminal closed"),
}
FULL = errno.ENOSPC, os.strerror(errno.ENOSPC)


def raise_after(saved: int, number: int, monkeypatch: pytest.MonkeyPatch, *, halfway: bool = False) -> None:
    """Send a signal during decoding after image number `saved`, or while that image is being saved."""
    seen, save = [0], images.save_image

    class Raising(generator.Progress):
        def __call__(self, step: Any) -> None:
            if seen[0] == saved and step.index == 3 and not halfway:
                signal.raise_signal(number)
            super().__call__(step)

    def counting(*args: Any, **options: Any) -> None:
        seen[0] += 1
        if halfway and seen[0] == saved:
            signal.raise_signal(number)
        save(*args, **options)

    monkeypatch.setattr(generator, "Progress", Raising)
    monkeypatch.setattr(images, "save_image", counting)


@pytest.mark.parametrize(
    ("saved", "halfway", "number"),
    [
        *((2, False, number) for number in ENDS),
        (3, True, signal.SIGINT),  # the batch that is being saved is saved and reported
        (5, True, signal.SIGTERM),
        (0, False, signal.SIGINT),  # nothing is written
    ],
)
def test_a_signal_keeps_and_reports_finished_pictures(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, halfway: bool, number: signal.Signals
) -> None:
    raise_after(saved, number, monkeypatch, halfway=halfway)
    tokens, (code, word) = tmp_path / "t.json", ENDS[number]
    ended, out, error = run(*FOUR, "-n", 5, "--out", tmp_path / "out", "--json", "--tokens", tokens)
    assert (ended, error) == (code, f"lantern: error: {word}\n")
    if not saved:
        assert out == "" and not list(tmp_path.iterdir())
        return
    found, saved = json.loads(out), min(saved + saved % 2, 5)
    assert (found["stopped"], found["asked"]) == (word, 5) and len(found["paths"]) == saved
    assert sorted(map(str, (tmp_path / "out").iterdir())) == sorted(found["paths"])
    assert all(Path(path).read_bytes()[-8:-4] == b"IEND" for path in found["paths"])
    assert len(found["pictures"]) == len(json.loads(tokens.read_text())) == saved


def test_an_interrupted_comparison_reports_its_pairs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_after(1, signal.SIGINT, monkeypatch)
    code, out, _ = run("-n", 3, "--method", "eagle1", "--compare", "--json", "--out", tmp_path / "out")
    found = json.loads(out)
    assert code == 130 and (found["stopped"], found["asked"], len(found["comparisons"])) == ("interrupted", 3, 1)


def test_a_full_disk_keeps_earlier_pictures(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_bytes, list[Path]()

    def fill(self: Path, whole: Any) -> int:
        written.append(self)
        if len(written) == 3:
            write(self, whole[:4])
            raise OSError(*FULL, str(self))
        return write(self, whole)

    monkeypatch.setattr(Path, "write_bytes", fill)
    tokens = tmp_path / "t.json"
    code, out, error = run(*FOUR, "--out", tmp_path / "out", "--json", "--tokens", tokens)
    found = json.loads(out)
    lost = tmp_path / "out" / "a-red-apple-plain-fp32-g3-seed0-2.png"
    assert code == 1 and error == f"lantern: error: {lost}: No space left on device\n"
    assert sorted(map(str, (tmp_path / "out").iterdir())) == sorted(found["paths"]) and len(found["paths"]) == 2
    assert len(json.loads(tokens.read_text())) == 2 and found["stopped"].endswith("No space left on device")


def test_unwritable_tokens_leave_the_pictures(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(*FULL)))
    code, out, error = run(*FOUR, "--out", tmp_path / "out", "--tokens", tmp_path / "t.json")
    assert code == 1 and error == f"lantern: error: {tmp_path}/t.json: No space left on device\n"
    assert len(out.split()) == len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize("option", ["--out", "--tokens"])
def test_a_read_only_folder_is_refused_at_once(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (locked := tmp_path / "locked").mkdir()
    # permissions do not bind the superuser, who may be running this
    monkeypatch.setattr(shared.os, "access", lambda path, mode: Path(path) != locked)
    monkeypatch.setattr("lantern.generation.generator.make_batches", lambda *_, **__: pytest.fail("something was made"))
    path = locked / "deep" / "x" if option == "--out" else locked / "t.json"
    assert run(option, path) == (1, "", f"lantern: error: {locked}: cannot be written to\n")
    assert not list(locked.iterdir())


def test_a_signal_swallowed_by_foreign_token_is_remembered() -> None:
    with pytest.raises(Stopped, match="interrupted"), Stopping() as stopping:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stopping.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_swallowed_by_a_finalizer_ends_the_next_context() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with Stopping():
        Finalized()
        with pytest.raises(Stopped, match="interrupted"), Stopping():
            pytest.fail("the training has begun")
    with Stopping() as stopping:  # another command of the process
        assert not stopping.is_requested


def test_a_shield_holds_until_the_outermost_block_is_done() -> None:
    done = []
    with pytest.raises(Stopped), Stopping() as stopping, stopping.shield():
        with stopping.shield():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


STUBBORN = """
import sys, time
from lantern.cli.command import Command, run_command

def run(args):
    with args.stopping.shield():
        print("begun", flush=True)
        time.sleep(1000)
    return 0

sys.exit(run_command(Command("stubborn", "", lambda parser: None, run), []))
"""


def test_a_second_interrupt_ends_a_shielded_block() -> None:
    command = [sys.executable, "-c", STUBBORN]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert running.stdout is not None and running.stdout.readline() == "begun\n"
    for _ in range(2):
        running.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert running.poll() in (None, -signal.SIGINT)
    assert running.communicate(timeout=60) == ("", "") and running.returncode == -signal.SIGINT
