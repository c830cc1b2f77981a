"""Modules of eval run by both names from a checkout."""

import subprocess
import sys

import pytest

from lantern.eval.speed.surroundings import HERE


@pytest.mark.parametrize("module", ["eval.speed.equality", "lantern.eval.boards.card"])
def test_eval_modules_run_from_a_checkout(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: python -m lantern.eval.") and not done.stderr
