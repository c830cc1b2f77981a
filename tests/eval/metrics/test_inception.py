import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lantern.eval.metrics.inception import SIDE, load_inception
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import found_at
from tests.eval.tiny_metrics import save_tiny_inception


def pixels(side: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_script_without_logits_names_the_file_with_logits(tmp_path: Path) -> None:
    network = load_inception(found_at(save_tiny_inception(tmp_path / "n.pt")))
    with pytest.raises(ValueError, match="pt_inception-2015-12-05-6726825d.pth"):
        dataclasses.replace(network, gives_logits=True).embed(torch.zeros(1, 3, SIDE, SIDE))


def test_file_with_code_is_not_executed(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "bomb.pth"
    with path.open("wb") as file:
        pickle.dump({"x": Bomb()}, file, protocol=2)
    with pytest.raises(ValueError, match="posix.mkdir, which is code"):
        load_inception(found_at(path))
    assert not (tmp_path / "ran").exists()


def tensors_of_inception(path: Path) -> Path:
    """A file of random tensors with logits, as pytorch-fid's."""
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    class Free(theirs.FeatureExtractorInceptionV3):
        def load_state_dict(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            pass

    torch.manual_seed(0)
    empty = path.with_name("empty.pth")
    torch.save({}, empty)
    torch.save(Free("x", ["2048"], feature_extractor_weights_path=str(empty)).state_dict(), path)
    return path


def test_file_with_logits_matches_torch_fidelity(tmp_path: Path) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tensors_of_inception(tmp_path / "pt.pth")
    network = load_inception(found_at(path), resize="legacy")
    theirs = FeatureExtractorInceptionV3("x", ["2048", "logits"], feature_extractor_weights_path=str(path))
    pictures = raw(pixels())[None]
    features, logits = theirs(pictures)
    prepared, with_logits = network.prepare(pixels())[None], dataclasses.replace(network, gives_logits=True)
    assert torch.allclose(network.embed(prepared), features, rtol=1e-4, atol=1e-5)
    assert torch.allclose(with_logits.embed(prepared), logits, rtol=1e-4, atol=1e-5)
