"""The folder of a toy model and the model in it, which tests do not change."""

from pathlib import Path

import pytest

from lantern.models.folder import Model, load_model
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    return load_model(folder, device="cpu", engine="eager")
