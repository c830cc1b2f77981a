from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip import tokenize as tokens
from PIL import Image

from lantern.eval.metrics.clip_score import Clip, clip_scores, cut_prompts, load_clip, load_open_clip, load_preference
from lantern.eval.metrics.weights import find_weights
from tests.eval.tiny_metrics import TINY_OPEN_CLIP, save_tiny_clip, tiny_open_clip

PROMPTS = ["a red apple", "two dogs, side by side", "x"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return load_clip(find_weights("clip", {"clip": save_tiny_clip(tmp_path_factory.mktemp("clip"))}))


def pixels(height: int = 40, width: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_clip_score_matches_transformers(clip: Clip) -> None:
    inputs = torch.stack([clip.prepare(pixels(seed=seed)) for seed in range(3)])
    with torch.inference_mode():
        expected = clip.network(input_ids=tokens(PROMPTS), pixel_values=inputs)
    cosines = (expected.image_embeds * expected.text_embeds).sum(-1)
    found = clip_scores(clip.embed(inputs), clip.embed_prompts(PROMPTS))
    assert torch.allclose(clip.embed_prompts(PROMPTS), clip.embed_prompts(PROMPTS, batch=1), rtol=0, atol=1e-6)
    assert torch.allclose(found, 100 * cosines, rtol=0, atol=1e-4)
    assert found.abs().max() > 1e-2


@pytest.mark.parametrize("size", [(40, 40), (32, 32), (57, 33), (20, 90)])
def test_pictures_are_resized_by_pillow_and_cropped_at_the_centre(clip: Clip, size: tuple[int, int]) -> None:
    picture = Image.fromarray(pixels(*size))
    scale = 32 / min(picture.size)
    width, height = (max(32, int(length * scale)) for length in picture.size)
    left, top = round((width - 32) / 2), round((height - 32) / 2)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 32, top + 32))
    mean, spread = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    expected = (np.array(resized, dtype=np.float64) / 255 - mean) / spread
    assert np.allclose(clip.prepare(pixels(*size)).permute(1, 2, 0).numpy(), expected, rtol=0, atol=1e-5)


def test_long_prompts_are_counted_and_truncated(clip: Clip) -> None:
    long = "word " * 100
    assert cut_prompts([long, "short", "word " * 75]) == 1
    assert torch.equal(clip.embed_prompts([long]), clip.embed_prompts([long + "more"]))


def test_open_clip_file_gives_open_clip_features(tmp_path: Path) -> None:
    theirs = tiny_open_clip()
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "hps.pt")
    ours = load_open_clip(find_weights("hps", {"hps": tmp_path / "hps.pt"}), TINY_OPEN_CLIP)
    pictures = torch.randn(3, 3, 32, 32)
    prompts = ["a red apple", "an owl"]
    with torch.inference_mode():
        images = theirs.encode_image(pictures, normalize=True)  # type: ignore[operator]
        texts = theirs.encode_text(tokens(prompts), normalize=True)  # type: ignore[operator]
    assert torch.allclose(ours.embed(pictures), images, rtol=0, atol=1e-5)
    assert torch.allclose(ours.embed_prompts(prompts), texts, rtol=0, atol=1e-5)


def test_transformers_folder_loads(tmp_path: Path) -> None:
    found = find_weights("pickscore", {"pickscore": save_tiny_clip(tmp_path)})
    network = load_preference(found)
    assert network.embed(torch.zeros(1, 3, 32, 32)).shape == (1, 16)
