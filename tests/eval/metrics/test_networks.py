"""Networks of metrics, against the libraries that the figures are compared with."""

import dataclasses
import hashlib
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip import tokenize as tokens
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torchmetrics.functional.image.lpips import _LPIPS
from torchvision.models import alexnet as architecture

from lantern.eval.metrics import weights
from lantern.eval.metrics.clip_score import Clip, clip_scores, cut_prompts, load_clip, load_preference
from lantern.eval.metrics.inception import SIDE, load_inception
from lantern.eval.metrics.judges import load_lpips, psnr
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import Found, WeightsSource, find_weights, found_at, sources
from tests.eval.tiny_metrics import TINY_OPEN_CLIP, save_tiny_clip, save_tiny_inception, tiny_open_clip
from tests.refusals import refused

PROMPTS = ["a red apple", "two dogs, side by side", "x"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return load_clip(find_weights("clip", {"clip": save_tiny_clip(tmp_path_factory.mktemp("clip"))}))


def pixels(height: int = 40, width: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_clip_score_matches_transformers_and_long_prompts_are_counted_and_truncated(clip: Clip) -> None:
    inputs = torch.stack([clip.prepare(pixels(seed=seed)) for seed in range(3)])
    with torch.inference_mode():
        expected = clip.network(input_ids=tokens(PROMPTS), pixel_values=inputs)
    cosines = (expected.image_embeds * expected.text_embeds).sum(-1)
    found = clip_scores(clip.embed(inputs), clip.embed_prompts(PROMPTS))
    assert torch.allclose(clip.embed_prompts(PROMPTS), clip.embed_prompts(PROMPTS, batch=1), rtol=0, atol=1e-6)
    assert torch.allclose(found, 100 * cosines, rtol=0, atol=1e-4)
    assert found.abs().max() > 1e-2
    long = "word " * 100
    assert cut_prompts([long, "short", "word " * 75]) == 1
    assert torch.equal(clip.embed_prompts([long]), clip.embed_prompts([long + "more"]))
    assert torch.equal(load_preference(clip.weights).embed(inputs), clip.embed(inputs))  # a folder of transformers


@pytest.mark.parametrize("size", [(57, 33), (20, 90)])
def test_pictures_are_resized_by_pillow_and_cropped_at_the_centre(clip: Clip, size: tuple[int, int]) -> None:
    picture = Image.fromarray(pixels(*size))
    scale = 32 / min(picture.size)
    width, height = (max(32, int(length * scale)) for length in picture.size)
    left, top = round((width - 32) / 2), round((height - 32) / 2)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 32, top + 32))
    mean, spread = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    expected = (np.array(resized, dtype=np.float64) / 255 - mean) / spread
    assert np.allclose(clip.prepare(pixels(*size)).permute(1, 2, 0).numpy(), expected, rtol=0, atol=1e-5)


def test_open_clip_file_gives_open_clip_features(tmp_path: Path) -> None:
    theirs = tiny_open_clip()
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "hps.pt")
    ours = load_preference(find_weights("hps", {"hps": tmp_path / "hps.pt"}), TINY_OPEN_CLIP)
    pictures = torch.randn(3, 3, 32, 32)
    prompts = ["a red apple", "an owl"]
    with torch.inference_mode():
        images = theirs.encode_image(pictures, normalize=True)  # type: ignore[operator]
        texts = theirs.encode_text(tokens(prompts), normalize=True)  # type: ignore[operator]
    assert torch.allclose(ours.embed(pictures), images, rtol=0, atol=1e-5)
    assert torch.allclose(ours.embed_prompts(prompts), texts, rtol=0, atol=1e-5)


def test_script_without_logits_names_the_file_with_logits(tmp_path: Path) -> None:
    network = load_inception(found_at(save_tiny_inception(tmp_path / "n.pt")))
    with_logits = dataclasses.replace(network, gives_logits=True)
    refused(with_logits.embed, torch.zeros(1, 3, SIDE, SIDE), match="pt_inception-2015-12-05-6726825d.pth")


def test_file_with_logits_matches_torch_fidelity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pt.pth"
    torch.save({}, path)
    torch.manual_seed(0)
    with monkeypatch.context() as patch:  # random tensors
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        random = FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path=str(path))
    torch.save(random.state_dict(), path)
    network = load_inception(found_at(path), resize="legacy")
    theirs = FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path))
    features, logits = theirs(raw(pixels())[None])
    prepared, with_logits = network.prepare(pixels())[None], dataclasses.replace(network, gives_logits=True)
    assert torch.allclose(network.embed(prepared), features, rtol=1e-4, atol=1e-5)
    assert torch.allclose(with_logits.embed(prepared), logits, rtol=1e-4, atol=1e-5)


def test_psnr_is_its_formula() -> None:
    a = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    assert float(psnr(a, a + 10)[0]) == pytest.approx(28.1308, abs=1e-4)
    assert psnr(a, a).isinf().all()


def test_lpips_matches_torchmetrics_with_the_given_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = architecture(weights=None)
    torch.save(whole.state_dict(), tmp_path / "alexnet.pth")
    lpips = load_lpips(find_weights("lpips", {"lpips": tmp_path / "alexnet.pth"}))
    theirs = _LPIPS(pretrained=True, net="alex", pnet_rand=True)
    for part in theirs.net.children():
        for number in dict(part.named_children()):
            part._modules[number] = whole.features[int(number)]
    a, b = torch.randint(0, 256, (2, 2, 3, 64, 64), dtype=torch.uint8)
    with torch.inference_mode():
        expected = theirs.eval()(a / 255.0, b / 255.0, normalize=True).flatten()
    assert torch.allclose(lpips(a, b), expected, rtol=1e-4, atol=1e-6) and float(expected.min()) > 0
    assert float(lpips(a, a.clone()).abs().max()) == 0


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: WeightsSource) -> Path:
        raise ConnectionError("download from the hub failed (offline)")

    monkeypatch.setattr(weights, "_from_hub", refuse)


@pytest.mark.parametrize("name", list(sources()))
def test_missing_weights_are_reported_in_one_line_with_file_and_place(name: str, tmp_path: Path) -> None:
    line, source = refused(find_weights, name, cache=tmp_path, error=FileNotFoundError), sources()[name]
    assert str(tmp_path) in line and f"--weights {name}=PATH" in line
    assert (source.file or "model.safetensors") in line and source.sha256 in line


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
        ("inception", None, "wanted 7ff4a85c.*delete it"),
    ):
        refused(find_weights, name, given, cache=tmp_path, match=message)


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("load", "state", "message"),
    [
        (load_clip, b"no folder", "is not a transformers CLIP folder"),
        (load_inception, b"nothing", "is no whole checkpoint of plain tensors"),
        (load_inception, pickle.dumps({"x": Bomb()}, 2), ".*posix.mkdir, which is code"),
        (load_inception, {"fc.weight": torch.zeros(2, 2)}, "holds a network other than Inception"),
        (load_lpips, {"features.0.weight": torch.zeros(1)}, "is not torchvision's AlexNet"),
        (load_preference, tiny_open_clip().state_dict(), "holds a CLIP of another shape"),
        (partial(load_preference, config=TINY_OPEN_CLIP), {}, r"lacks positional_embedding \(and \d+ more\)"),
    ],
)
def test_other_networks_and_code_are_refused_by_file(
    load: Callable[[Found], Any], state: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
    monkeypatch.chdir(tmp_path)
    refused(load, Found(path, "0"), match=rf"x\.pth {message}")
    assert not Path("ran").exists()
