from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from lantern import LanternPipeline
from lantern.models.folder import INDEX_NAME


def tokens(pipe: Any, **how: Any) -> list[int]:
    made = pipe("a red apple", generator=torch.Generator().manual_seed(3), output_type="latent", **how)
    return made.tokens.flatten().tolist()


@pytest.mark.filterwarnings("ignore")
def test_diffusers_loads_what_was_assembled_and_what_was_saved(folder: Path, tmp_path: Path) -> None:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipe = LanternPipeline.from_pretrained(folder)
    pipe.transformer.tokens_per_step = {2: 1.5}
    pipe.save_pretrained(tmp_path / "saved")
    for place, known in ((folder, {}), (tmp_path / "saved", {2: 1.5})):
        found = DiffusionPipeline.from_pretrained(place, trust_remote_code=True)
        assert type(found).__name__ == "LanternPipeline" and tokens(found) == tokens(pipe)
        assert tokens(found, method="sam") == tokens(pipe, method="sam") and found.model.tokens_per_step == known


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
