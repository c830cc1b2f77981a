import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def fuzz(count: int, seed: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.fuzz", "--count", str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"{count} mutations, 0 not refused" in done.stdout


def test_damaged_folders_are_refused_in_one_line() -> None:
    fuzz(60, seed=1)


@pytest.mark.slow
def test_two_thousand_damaged_folders_are_refused_in_one_line() -> None:
    fuzz(2000, seed=0)
