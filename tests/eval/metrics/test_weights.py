import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.eval.metrics import weights
from lantern.eval.metrics.clip_score import load_clip, load_preference
from lantern.eval.metrics.inception import load_inception
from lantern.eval.metrics.judges import load_lpips
from lantern.eval.metrics.weights import Found, WeightsSource, find_weights, sources
from tests.eval.tiny_metrics import TINY_OPEN_CLIP, tiny_open_clip


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: WeightsSource) -> Path:
        raise ConnectionError("download from the hub failed (offline)")

    monkeypatch.setattr(weights, "_from_hub", refuse)


@pytest.mark.parametrize("name", list(sources()))
def test_missing_weights_are_reported_in_one_line_with_file_and_place(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as reported:
        find_weights(name, cache=tmp_path)
    line, source = str(reported.value), sources()[name]
    assert "\n" not in line
    assert str(tmp_path) in line and f"--weights {name}=PATH" in line
    assert (source.file or "model.safetensors") in line
    assert source.sha256 in line


def test_weights_are_found_where_given_else_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path))
    (tmp_path / sources()["hps"].file).write_bytes(b"cached")
    (tmp_path / "own.pt").write_bytes(b"own")
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "model.safetensors").write_bytes(b"tensors")
    for name, given, content in (("hps", "", b"cached"), ("hps", "own.pt", b"own"), ("clip", "clip", b"tensors")):
        found = find_weights(name, {name: tmp_path / given} if given else None)
        assert found.path == tmp_path / (given or sources()[name].file)
        assert found.sha256 == hashlib.sha256(content).hexdigest()


def test_wrong_files_and_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / sources()["inception"].file).write_bytes(b"something else")
    for name, given, message in (
        ("hps", {"hps": tmp_path / "none.pt"}, "no such file"),
        ("clip", {"clip": tmp_path}, "neither model.safetensors nor"),
        ("inception", None, "expected 7ff4a85c.*delete it"),
    ):
        with pytest.raises(ValueError, match=message):
            find_weights(name, given, cache=tmp_path)


@pytest.mark.parametrize(
    ("load", "state", "message"),
    [
        (load_inception, b"nothing", "is no whole checkpoint of plain tensors"),
        (load_inception, {"fc.weight": torch.zeros(2, 2)}, "holds a network other than Inception"),
        (load_lpips, {"features.0.weight": torch.zeros(1)}, "is not torchvision's AlexNet"),
        (load_preference, tiny_open_clip().state_dict(), "holds a CLIP of another shape"),
        (
            lambda found: load_preference(found, TINY_OPEN_CLIP),
            {name: x for name, x in tiny_open_clip().state_dict().items() if name != "visual.proj"},
            "lacks visual.proj",
        ),
    ],
)
def test_other_networks_are_named(load: Callable[[Found], Any], state: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
    with pytest.raises(ValueError, match=rf"x\.pth {message}"):
        load(Found(path, "0"))


def test_a_folder_of_another_network_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a transformers CLIP folder"):
        load_clip(Found(tmp_path, "0"))
