"""CLIP score and preference scores: 100 x the cosine of an image's and its prompt's embedding.

CLIP score (arXiv:2104.08718, without its factor) has two protocols: torchmetrics' (the prompt as it is, the mean
clamped at 0) and LANTERN's (ViT-B/32, "A photo depicts" before each prompt). Both use OpenAI's ViT-B/32 unless another
folder is given. The network is transformers', tokens and the resize of images are open_clip's.

Preference scores are HPSv2.1 (arXiv:2306.09341) and PickScore (arXiv:2305.01569), both fine-tuned CLIP ViT-H/14.
PickScore is a folder of transformers; HPSv2.1 is a file and a network of open_clip. PickScore's published score is the
one here times its learned scale, exp(logit_scale) / 100.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.process import quiet
from lantern.eval.metrics.inception import read_tensors
from lantern.eval.metrics.weights import Found

LENGTH = 77  # tokens with beginning and end
RESIZE = "Pillow bicubic, shorter side, centre crop (open_clip)"


@dataclass(frozen=True)
class Clip:
    """Maps images and prompts to unit vectors of one space.

    `see` and `read` map images and tokens to features of `network`; `resized` maps an image of Pillow to its input.
    """

    network: Any  # transformers' CLIPModel, whose annotations do not type-check, or open_clip's CLIP
    resized: Any  # open_clip's function
    see: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    weights: Found
    device: torch.device

    def prepare(self, pixels: np.ndarray) -> Float[Tensor, "3 side side"]:
        """Return an image (uint8, h w 3) as network input."""
        return self.resized(Image.fromarray(pixels))

    @torch.inference_mode()
    def embed(self, inputs: Float[Tensor, "b 3 side side"]) -> Float[Tensor, "b c"]:
        """Return unit vectors of prepared images, on the CPU."""
        return _unit(self.see(inputs.to(self.device)))

    @torch.inference_mode()
    def embed_prompts(self, prompts: Sequence[str], *, batch: int = 64) -> Float[Tensor, "b c"]:
        """Return unit vectors of prompts, on the CPU; longer prompts are truncated to LENGTH tokens."""
        from open_clip import tokenize

        rows = [tokenize(list(prompts[i : i + batch])) for i in range(0, len(prompts), batch)]
        return torch.cat([_unit(self.read(one.to(self.device))) for one in rows])


def load_clip(found: Found, *, device: torch.device | str = "cpu") -> Clip:
    """Load a CLIP from a folder of transformers; ValueError for another kind of folder."""
    from open_clip import image_transform
    from transformers import CLIPModel

    try:
        with quiet():
            network: Any = CLIPModel.from_pretrained(found.path, local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{found.path} is not a transformers CLIP folder: {one_line(error)[:200]}") from error
    network.to(device)
    return Clip(
        network, image_transform(network.config.vision_config.image_size, is_train=False),
        lambda pictures: network.get_image_features(pictures).pooler_output,
        lambda words: network.get_text_features(words).pooler_output, found, torch.device(device),
    )  # fmt: skip


def cut_prompts(prompts: Sequence[str]) -> int:
    """Return how many prompts are longer than CLIP's text length."""
    from open_clip import tokenize

    return int((tokenize(list(prompts), LENGTH + 1)[:, -1] != 0).sum())


def clip_scores(pictures: Float[Tensor, "n c"], prompts: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Return 100 x the cosine of each image and its prompt, both given as unit vectors."""
    return 100 * (pictures * prompts).sum(-1)


def _unit(features: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    return torch.nn.functional.normalize(features.float(), dim=-1).cpu()


def load_preference(
    found: Found, config: Mapping[str, Any] | None = None, *, device: torch.device | str = "cpu"
) -> Clip:
    """Load a network from a folder, or a file of open_clip of sizes `config` (ViT-H/14); ValueError for another."""
    from open_clip import get_model_config, image_transform
    from open_clip.model import CLIP

    if found.path.is_dir():
        return load_clip(found, device=device)
    config = config or get_model_config("ViT-H-14")
    assert config is not None
    state = {name.removeprefix("module."): tensor for name, tensor in read_tensors(found.path).items()}
    with torch.device("meta"):
        network = CLIP(**config)
    try:
        missing, _ = network.load_state_dict(state, assign=True, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{found.path} holds a CLIP of another shape: {one_line(error)[:200]}") from error
    if missing:
        raise ValueError(f"{found.path} lacks {missing[0]} (and {len(missing) - 1} more): it is another kind of CLIP")
    # files do not hold the causal mask
    network.attn_mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    network.float().eval().to(device)
    resized = image_transform(config["vision_cfg"]["image_size"], is_train=False)
    return Clip(network, resized, network.encode_image, network.encode_text, found, torch.device(device))
