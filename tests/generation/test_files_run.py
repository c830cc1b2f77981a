"""One `lantern-generate` call runs few files of the project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_folder import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("model", "method", "most"), [("toy", "gumbel-jacobi", 43), ("lantern-emoji", "auto", 47)])
def test_one_picture_runs_few_files(model: str, method: str, most: int, tmp_path: Path) -> None:
    if model == "toy":
        model = str(save_tiny_model(tmp_path / model))
    call = ["--model", model, "--method", method, "--prompt", "a red apple", "--quiet"]
    command = [sys.executable, "-m", "tests.generation.trace_files", *call]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) files run", done.stdout)
    assert found is not None and int(found[1]) <= most, done.stdout
    for unused in ("lantern/generation/comparison.py", "lantern/training", "lantern/drafters/eagle/drafter.py"):
        assert unused not in done.stdout
