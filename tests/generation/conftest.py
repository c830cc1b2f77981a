"""The folder of a toy model, which tests do not change."""

from pathlib import Path

import pytest

from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy")
