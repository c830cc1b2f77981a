"""Our folders in the loaders of diffusers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.core.io import read_checksums
from lantern.models.folder import INDEX_NAME
from tests.tiny_folder import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys, torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
made = pipe("a red apple", generator=torch.Generator().manual_seed(3), output_type="latent")
print(type(pipe).__name__, made.tokens.flatten().tolist())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "toy")


def codes(pipe: Any) -> list[int]:
    made = pipe("a red apple", generator=torch.Generator().manual_seed(3), output_type="latent")
    return made.tokens.flatten().tolist()


def loaded_by_diffusers(folder: Path) -> str:
    code = "import lantern\n" + CODE  # lantern first: it defines what torchvision misses beside CPU builds of torch
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_diffusers_loads_what_was_assembled_and_what_was_saved(folder: Path, tmp_path: Path) -> None:
    pipe = LanternPipeline.from_pretrained(folder)
    expected = f"LanternPipeline {codes(pipe)}"
    assert loaded_by_diffusers(folder) == expected
    pipe.save_pretrained(tmp_path / "saved")
    assert loaded_by_diffusers(tmp_path / "saved") == expected


def test_a_saved_pipeline_keeps_its_method_and_lists_checksums(folder: Path, tmp_path: Path) -> None:
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.method = "eagle1"
    pipe.save_pretrained(tmp_path / "saved")
    assert LanternPipeline.from_pretrained(tmp_path / "saved").method == "eagle1"
    for path in (tmp_path / "saved").rglob("*.safetensors"):
        assert path.name in read_checksums(path.parent), path


def test_a_pipeline_of_rounded_weights_can_be_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    pipe = LanternPipeline.from_pretrained(folder).to(torch.bfloat16).to(torch.float32)
    pipe.save_pretrained(tmp_path / "saved")
    assert codes(LanternPipeline.from_pretrained(tmp_path / "saved")) == codes(pipe)


def test_indices_of_earlier_versions_load(folder: Path) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    old = {
        name: ["lantern.pipeline", *value[1:]] if value[0] == "lantern.generation.pipeline" else value
        for name, value in index.items()
        if isinstance(value, list)
    }
    path.write_text(json.dumps(index | old | {"_class_name": "LanternPipeline"}))
    try:
        assert LanternPipeline.from_pretrained(folder).drafter is not None
    finally:
        path.write_text(json.dumps(index))
