"""CLIP score and preference scores: 100 x the cosine of an image's and its prompt's embedding.

CLIP score (arXiv:2104.08718, without its factor) has two protocols: torchmetrics' (the prompt as it is, the mean
clamped at 0) and LANTERN's (ViT-B/32, "A photo depicts" before each prompt). Both use OpenAI's ViT-B/32 unless another
folder is given. The network is transformers', the tokens are open_clip's, and images are resized by Pillow as in
open_clip.

Preference scores are HPSv2.1 (arXiv:2306.09341) and PickScore (arXiv:2305.01569), both fine-tuned CLIP ViT-H/14.
PickScore is a folder of transformers; HPSv2.1 is a file of open_clip, whose tensors are renamed here to those of
transformers. PickScore's published score is the one here times its learned scale, exp(logit_scale) / 100.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import one_line
from lantern.eval.metrics.inception import read_tensors
from lantern.eval.metrics.weights import Found

if TYPE_CHECKING:
    from transformers import CLIPConfig

LENGTH = 77  # tokens with beginning and end
LANTERN_PREFIX = "A photo depicts "
RESIZE = "Pillow bicubic, shorter side, centre crop (open_clip)"
MEAN, SPREAD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Clip:
    """Maps images and prompts to unit vectors of one space; `side` is the input size in pixels."""

    network: Any  # transformers' CLIPModel; its annotations do not type-check
    weights: Found
    device: torch.device

    @property
    def side(self) -> int:
        """Height and width of a prepared image."""
        return int(self.network.config.vision_config.image_size)

    def prepare(self, pixels: np.ndarray) -> Float[Tensor, "3 side side"]:
        """Return an image (uint8, h w 3) as network input."""
        from PIL import Image

        picture = Image.fromarray(pixels)
        scale = self.side / min(picture.size)
        width, height = (max(self.side, int(length * scale)) for length in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (round((length - self.side) / 2) for length in (width, height))
        cut = np.array(picture.crop((left, top, left + self.side, top + self.side)), dtype=np.float32) / 255
        return torch.from_numpy((cut - np.array(MEAN, np.float32)) / np.array(SPREAD, np.float32)).permute(2, 0, 1)

    @torch.inference_mode()
    def embed(self, inputs: Float[Tensor, "b 3 side side"]) -> Float[Tensor, "b c"]:
        """Return unit vectors of prepared images, on the CPU."""
        found = self.network.get_image_features(pixel_values=inputs.to(self.device))
        return _unit(found)

    @torch.inference_mode()
    def embed_prompts(self, prompts: Sequence[str], *, batch: int = 64) -> Float[Tensor, "b c"]:
        """Return unit vectors of prompts, on the CPU; longer prompts are truncated to LENGTH tokens."""
        rows = [tokens(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
        found = [self.network.get_text_features(input_ids=one.to(self.device)) for one in rows]
        return torch.cat([_unit(one) for one in found])


def load_clip(found: Found, *, device: torch.device | str = "cpu") -> Clip:
    """Load a CLIP from a folder of transformers; ValueError for another kind of folder."""
    from transformers import CLIPModel, logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        network: Any = CLIPModel.from_pretrained(found.path, local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{found.path} is not a transformers CLIP folder: {one_line(error)[:200]}") from error
    finally:
        if had_bars:
            logging.enable_progress_bar()
    return Clip(network.to(device), found, torch.device(device))


def tokens(prompts: Sequence[str]) -> Int[Tensor, "b 77"]:
    """Return CLIP's tokens of prompts: beginning, text, end, zeros."""
    from open_clip import tokenize

    return tokenize(list(prompts), context_length=LENGTH)


def cut_prompts(prompts: Sequence[str]) -> int:
    """Return how many prompts are longer than CLIP's text length."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    return sum(len(tokenizer.encode(prompt)) > LENGTH - 2 for prompt in prompts)


def clip_scores(pictures: Float[Tensor, "n c"], prompts: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Return 100 x the cosine of each image and its prompt, both given as unit vectors."""
    return 100 * (pictures * prompts).sum(-1)


def _unit(found: object) -> Float[Tensor, "b c"]:
    # transformers 5 returns an object with the projected pooler_output, earlier versions the tensor
    features = found if isinstance(found, Tensor) else found.pooler_output  # type: ignore[attr-defined]
    return torch.nn.functional.normalize(features.float(), dim=-1).cpu()


LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
TOP = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "logit_scale": "logit_scale",
}
# open_clip stores these as (in, out), transformers as a linear map
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}


def load_preference(found: Found, *, device: torch.device | str = "cpu") -> Clip:
    """Load a preference network from a folder of transformers or a file of open_clip's ViT-H/14."""
    if found.path.is_dir():
        return load_clip(found, device=device)
    return load_open_clip(found, vit_h_14(), device=device)


def vit_h_14() -> "CLIPConfig":
    """Return the config of CLIP ViT-H/14, which uses the exact GELU."""
    from transformers import CLIPConfig

    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    return CLIPConfig(
        text_config=text | {"hidden_act": "gelu", "projection_dim": 1024},
        vision_config=vision | {"hidden_act": "gelu", "projection_dim": 1024, "patch_size": 14, "image_size": 224},
        projection_dim=1024,
    )


def load_open_clip(found: Found, config: "CLIPConfig", *, device: torch.device | str = "cpu") -> Clip:
    """Load a file of open_clip tensors into transformers' CLIP; ValueError for another shape."""
    from transformers import CLIPModel

    state = renamed(read_tensors(found.path))
    with torch.device("meta"):
        network: Any = CLIPModel(config)
    try:
        network.load_state_dict(state, assign=True, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{found.path} holds a CLIP of another shape: {one_line(error)[:200]}") from error
    missing = [name for name in network.state_dict() if name not in state]
    if missing:
        raise ValueError(f"{found.path} lacks {missing[0]} (and {len(missing) - 1} more): it is another kind of CLIP")
    for part in (network.text_model.embeddings, network.vision_model.embeddings):
        places = torch.arange(part.position_embedding.num_embeddings)
        part.register_buffer("position_ids", places[None], persistent=False)
    return Clip(network.float().eval().to(device), found, torch.device(device))


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return open_clip's tensors under transformers' names."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.removeprefix("module.")
        if name in TOP:
            found[TOP[name]] = tensor
        elif name in TRANSPOSED:
            found[TRANSPOSED[name]] = tensor.T.contiguous()
        elif "transformer.resblocks." in name:
            found |= _layer(name, tensor)
    return found


def _layer(name: str, tensor: Tensor) -> dict[str, Tensor]:
    tower = "vision_model" if name.startswith("visual.") else "text_model"
    number, _, part = name.partition("resblocks.")[2].partition(".")
    stem = f"{tower}.encoder.layers.{number}"
    if part.startswith("attn.in_proj_"):
        end = part.removeprefix("attn.in_proj_")
        return {f"{stem}.self_attn.{one}_proj.{end}": cut for one, cut in zip("qkv", tensor.chunk(3), strict=True)}
    place, _, end = part.rpartition(".")
    return {f"{stem}.{LAYER[place]}.{end}": tensor}
