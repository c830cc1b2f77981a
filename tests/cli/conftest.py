"""Toy models, and a folder of its own for each test that writes files."""

import shutil
from pathlib import Path

import pytest

from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    generation = {"guidance": 3.0, "top_k": 12, "method": "eagle1"}
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "toy", generation=generation))


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toy model that makes images of classes."""
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "classes", model_type="c2i", cls_token_num=1))


@pytest.fixture(scope="session")
def blind(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toy model without a VQ tokenizer."""
    ignored = shutil.ignore_patterns("vqvae")
    return str(shutil.copytree(model, tmp_path_factory.mktemp("models") / "blind", ignore=ignored))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
