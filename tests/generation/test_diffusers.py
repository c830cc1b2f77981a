import inspect
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from lantern import LanternPipeline
from lantern.generation.generator import generate
from lantern.models.folder import INDEX_NAME, load_model


def tokens(pipe: Any, **how: Any) -> list[int]:
    made = pipe("a red apple", generator=torch.Generator().manual_seed(3), output_type="latent", **how)
    return made.tokens.flatten().tolist()


@pytest.mark.filterwarnings("ignore")
def test_diffusers_loads_what_was_assembled_and_what_was_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    warned = list[str]()
    for module in ("configuration_utils", "pipelines.pipeline_utils"):
        monkeypatch.setattr(f"diffusers.{module}.logger.warning", warned.append)
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.transformer.tokens_per_step = {2: 1.5}
    pipe.save_pretrained(tmp_path / "saved")
    for place, known in ((folder, {}), (tmp_path / "saved", {2: 1.5})):
        found = DiffusionPipeline.from_pretrained(place, trust_remote_code=True)
        assert type(found).__name__ == "LanternPipeline" and tokens(found) == tokens(pipe)
        assert tokens(found, method="sam") == tokens(pipe, method="sam") and found.model.tokens_per_step == known
    found = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, trust_remote_code=True)
    assert (found.transformer.dtype, found.vqvae.dtype) == (torch.bfloat16, torch.float32)
    assert not [line for line in warned if "ignored" in line]


def test_a_pushed_folder_is_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[set[str]] = []

    def upload(working_dir: str, repo_id: str, **how: Any) -> str:
        sent.append({path.relative_to(working_dir).as_posix() for path in Path(working_dir).rglob("*")})
        return f"https://hub/{repo_id}/commit/{how['token']}"

    of_hub = "diffusers.utils.hub_utils"
    monkeypatch.setattr(f"{of_hub}.create_repo", lambda name, **_: SimpleNamespace(repo_id=f"somebody/{name}"))
    monkeypatch.setattr(f"{of_hub}.load_or_create_model_card", lambda *_, **__: ModelCard("---\nlicense: mit\n---\n"))
    pipe = LanternPipeline.from_pretrained(folder)
    monkeypatch.setattr(pipe, "_upload_folder", upload)
    assert pipe.push_to_hub("apples", token="t") == "https://hub/somebody/apples/commit/t"
    pipe.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="apples", token="t")
    needed = {"README.md", "pipeline.py", INDEX_NAME, "transformer/model.safetensors", "parts/medusa/config.json"}
    assert len(sent) == 2 and all(needed <= files for files in sent)


def served(folder: Path, **fields: Any) -> list[Any]:
    """Load and call the pipeline as vLLM-Omni's adapter for diffusers does."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=True)
    for name in ("_flash_3_hub", "flash"):
        with suppress(Exception):
            pipe.transformer.set_attention_backend(name)
            break
    else:
        pipe.transformer.set_attention_backend("native")
    offered = {"generator": torch.Generator().manual_seed(fields.pop("seed")), "num_inference_steps": 50} | fields
    known = inspect.signature(pipe.__call__).parameters
    return pipe(**{name: value for name, value in offered.items() if name in known}).images


# the adapter passes it under this name
@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")
def test_pictures_are_those_of_the_seed_and_another_size_is_refused(folder: Path) -> None:
    images = served(folder, prompt="a red apple", seed=11, num_images_per_prompt=2, guidance_scale=2.0)
    model = load_model(folder, dtype="fp32")
    expected = list(generate(model, ["a red apple"] * 2, seed=11, sampling=model.sampling(guidance=2.0), batch=2))
    for image, picture in zip(images, expected, strict=True):
        assert picture.pixels is not None and np.array_equal(np.asarray(image), picture.pixels.numpy())
    assert served(folder, prompt="a red apple", seed=1, height=8, width=8)[0].size == (8, 8)
    with pytest.raises(ValueError, match="height"):
        served(folder, prompt="a red apple", seed=1, height=9, width=8)
