"""The toy model of `lantern-generate`, and a folder of its own for each test that writes files."""

from pathlib import Path

import pytest

from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    generation = {"guidance": 3.0, "top_k": 12, "method": "eagle1"}
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "toy", generation=generation))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
