"""Our folders in the loaders of diffusers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lantern import LanternPipeline
from lantern.generation.pipeline import model_card
from lantern.models.folder import INDEX_NAME, load_model
from tests.tiny_folder import save_tiny_model


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


class Hub:
    """The calls of `HfApi` that are used, which keep what they are given."""

    uploaded: ClassVar[dict[str, Any]] = {}

    def __init__(self, token: str | None = None) -> None:
        self.uploaded["token"] = token

    def create_repo(self, repo_id: str, **how: Any) -> Any:
        self.uploaded["created"] = how
        return SimpleNamespace(repo_id=f"somebody/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, **how: Any) -> str:
        files = {path.relative_to(folder_path).as_posix(): path for path in folder_path.rglob("*") if path.is_file()}
        self.uploaded.update({"files": set(files), "card": files["README.md"].read_text(), "repo_id": repo_id, **how})
        return f"https://hub/{repo_id}/commit/1"


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_pushed_folder_has_a_model_card(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.method = "gumbel-jacobi"
    what: dict[str, Any] = {"license": "mit", "base_model": "owner/base", "token": "t", "private": True}
    if is_saved:
        pipe.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="apples", **what)
    else:
        assert pipe.push_to_hub("apples", **what) == "https://hub/somebody/apples/commit/1"
    sent = Hub.uploaded
    assert sent["token"] == "t" and sent["created"] == {"private": True, "exist_ok": True}
    assert {"pipeline.py", INDEX_NAME, "transformer/model.safetensors", "parts/medusa/config.json"} <= sent["files"]
    card = huggingface_hub.ModelCard(sent["card"])
    header = card.data.to_dict()
    assert header["license"] == "mit" and header["base_model"] == "owner/base"
    assert header["library_name"] == "diffusers" and header["pipeline_tag"] == "text-to-image"
    assert "lantern" in header["tags"]
    assert 'LanternPipeline.from_pretrained("somebody/apples")' in card.text
    assert "the tokens of plain decoding" in card.text


def test_a_card_of_a_class_model_says_so(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path / "c2i", model_type="c2i"))
    card = model_card(model, "a/b", method="auto", license="unknown", base_model=None)
    assert "class_labels=0" in card and "pipeline_tag: unconditional-image-generation" in card
    assert "base_model" not in card and "license: unknown" in card


def test_a_model_that_does_not_run_is_not_pushed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    Hub.uploaded.clear()
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.transformer.norm.weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"tensor 'norm.weight' has shape \[3\]"):
        pipe.push_to_hub("apples")
    assert not Hub.uploaded
