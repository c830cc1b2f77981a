"""The calls of a server that runs any diffusers pipeline, on a folder of ours."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern.generation.generator import generate
from lantern.models.folder import load_model

# the adapter passes it under this name
pytestmark = pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")
BACKENDS = ("_flash_3_hub", "flash", "native")


def served(folder: Path, **fields: Any) -> list[Any]:
    """Load and call the pipeline as vLLM-Omni's adapter for diffusers does."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=True)
    for name in BACKENDS[:-1]:
        try:
            pipe.transformer.set_attention_backend(name)
            break
        except Exception:
            continue
    else:
        pipe.transformer.set_attention_backend(BACKENDS[-1])
    offered = {
        "prompt": fields.pop("prompt"),
        "generator": torch.Generator().manual_seed(fields.pop("seed")),
        "num_inference_steps": 50,
        **fields,
    }
    known = inspect.signature(pipe.__call__).parameters
    return pipe(**{name: value for name, value in offered.items() if name in known}).images


def test_pictures_are_those_of_the_seed_and_another_size_is_refused(folder: Path) -> None:
    images = served(folder, prompt="a red apple", seed=11, num_images_per_prompt=2, guidance_scale=2.0)
    model = load_model(folder, dtype="fp32")
    expected = list(generate(model, ["a red apple"] * 2, seed=11, sampling=model.sampling(guidance=2.0), batch=2))
    for image, picture in zip(images, expected, strict=True):
        assert picture.pixels is not None and np.array_equal(np.asarray(image), picture.pixels.numpy())
    assert served(folder, prompt="a red apple", seed=1, height=8, width=8)[0].size == (8, 8)
    with pytest.raises(ValueError, match="height"):
        served(folder, prompt="a red apple", seed=1, height=9, width=8)
