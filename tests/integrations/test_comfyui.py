"""The nodes for ComfyUI, loaded as ComfyUI loads a folder of custom_nodes, against a stand-in for its API."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.generation.generator import generate
from lantern.models.folder import load_model
from tests.integrations.fake_comfy_api import modules, run
from tests.tiny_folder import save_tiny_model

Nodes = dict[str, Any]  # by name
FOLDER = Path(__file__).resolve().parents[2] / "integrations" / "comfyui"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    spec: Any = importlib.util.spec_from_file_location("lantern_nodes", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lantern_nodes", module)
    monkeypatch.delitem(sys.modules, "lantern_nodes.nodes", raising=False)
    spec.loader.exec_module(module)

    async def listed() -> list[Any]:
        return await (await module.comfy_entrypoint()).get_node_list()

    return {node.define_schema().node_id: node for node in asyncio.run(listed())}


@pytest.mark.parametrize("method", ["plain", "eagle1", "gumbel-jacobi"])
def test_nodes_run_in_inference_mode_and_leave_the_model_usable(found: Nodes, folder: Path, method: str) -> None:
    call = {"prompt": "a red apple", "seed": 7, "method": method, "guidance": 2.0, "pictures": 1}
    with torch.inference_mode():
        (model,) = run(found["LanternLoad"], model=str(folder), engine="eager")
        inside, _ = run(found["LanternSample"], model=model, **call)
    outside, _ = run(found["LanternSample"], model=model, **call)
    assert torch.equal(inside, outside)


def test_pictures_are_those_of_lantern(found: Nodes, folder: Path) -> None:
    (model,) = run(found["LanternLoad"], model=str(folder), engine="eager")
    images, report = run(
        found["LanternSample"], model=model, prompt=" a red apple ", seed=7, method="eagle1", guidance=2.0, pictures=2
    )
    how: Any = {"seed": 7, "method": "eagle1", "sampling": model.sampling(guidance=2.0), "batch": 2}
    expected = generate(load_model(folder, engine="eager"), ["a red apple"] * 2, **how)
    pixels = torch.stack([one.pixels for one in expected if one.pixels is not None])
    assert images.dtype == torch.float32 and images.shape == (2, 8, 8, 3)
    assert torch.equal((images * 255).round().to(torch.uint8), pixels)
    lines = [json.loads(line) for line in report.splitlines()]
    assert [line["seed"] for line in lines] == [7, 7] and lines[0]["method"] == "eagle1"


def test_classes_are_numbers_and_defaults_are_those_of_the_model(found: Nodes, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "toy", model_type="c2i", cls_token_num=1)
    (model,) = run(found["LanternLoad"], model=str(folder))
    images, report = run(found["LanternSample"], model=model, prompt="1", method="plain")
    assert len(images) == 1 and json.loads(report)["label"] == 1
    for prompt, message in (("99999", "class label is 99999"), ("a red apple", "takes class labels: give a number")):
        with pytest.raises(ValueError, match=message):
            run(found["LanternSample"], model=model, prompt=prompt, method="plain")
