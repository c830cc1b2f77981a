"""Tiny networks and images for tests of metrics: random weights in the file formats of the real ones."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

FEATURES = 24


class TinyInception(nn.Module):
    """From (b 3 299 299) to a few features, like Inception's to 2048."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.last = nn.Linear(48, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.pool(x).flatten(1)) * 4)


def save_tiny_inception(path: Path, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(TinyInception().eval(), torch.zeros(1, 3, 299, 299))
        torch.jit.save(traced, str(path))
    return path


def save_pictures(folder: Path, count: int, *, seed: int = 0, side: int = 32, prompts: bool = False) -> list[Path]:
    """Smooth random images 000.png, 001.png, ...; their prompts inside, if so."""
    folder.mkdir(parents=True, exist_ok=True)
    random, paths = np.random.default_rng(seed), []
    for number in range(count):
        small = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        info = PngInfo()
        if prompts:
            info.add_text("prompt", f"prompt {number}")
        paths.append(folder / f"{number:03d}.png")
        Image.fromarray(small).resize((side, side)).save(paths[-1], pnginfo=info)
    return paths


def save_tiny_clip(folder: Path, *, seed: int = 0) -> Path:
    """A CLIP of two layers with CLIP's own tokens."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"hidden_act": "quick_gelu", "vocab_size": 49408, "projection_dim": 16}
    vision = sizes | {"hidden_act": "quick_gelu", "image_size": 32, "patch_size": 16, "projection_dim": 16}
    torch.manual_seed(seed)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).eval().save_pretrained(folder)
    return folder


TINY_OPEN_CLIP: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def tiny_open_clip() -> nn.Module:
    from open_clip.model import CLIP

    torch.manual_seed(0)
    return CLIP(**TINY_OPEN_CLIP).eval()
