import hashlib
from pathlib import Path

import pytest

from lantern.eval.metrics import weights
from lantern.eval.metrics.weights import SOURCES, WeightsSource, find_weights


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: WeightsSource) -> Path:
        raise ConnectionError("download from the hub failed (offline)")

    monkeypatch.setattr(weights, "_from_hub", refuse)


@pytest.mark.parametrize("name", list(SOURCES))
def test_missing_weights_are_reported_in_one_line_with_file_and_place(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as reported:
        find_weights(name, cache=tmp_path)
    line, source = str(reported.value), SOURCES[name]
    assert "\n" not in line
    assert str(tmp_path) in line and f"--weights {name}=PATH" in line
    assert (source.file or "model.safetensors") in line
    assert source.sha256 in line


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path))
    (tmp_path / SOURCES["hps"].file).write_bytes(b"tensors")
    found = find_weights("hps")
    assert found.path.parent == tmp_path
    assert found.sha256 == hashlib.sha256(b"tensors").hexdigest()


def test_given_file_precedes_the_cache(tmp_path: Path) -> None:
    (tmp_path / SOURCES["hps"].file).write_bytes(b"cached")
    own = tmp_path / "own.pt"
    own.write_bytes(b"own")
    assert find_weights("hps", {"hps": own}, cache=tmp_path).sha256 == hashlib.sha256(b"own").hexdigest()


def test_missing_given_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        find_weights("hps", {"hps": tmp_path / "none.pt"}, cache=tmp_path)


def test_cached_file_with_another_hash_is_rejected(tmp_path: Path) -> None:
    (tmp_path / SOURCES["inception"].file).write_bytes(b"something else")
    with pytest.raises(ValueError, match="expected 7ff4a85c.*delete it"):
        find_weights("inception", cache=tmp_path)


def test_transformers_folder_has_the_hash_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"tensors")
    found = find_weights("clip", {"clip": tmp_path})
    assert found.sha256 == hashlib.sha256(b"tensors").hexdigest()


def test_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        find_weights("clip", {"clip": tmp_path})
