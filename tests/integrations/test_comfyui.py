"""The nodes for ComfyUI, against a stand-in for its API (V3 schema), which refuses arguments that its classes lack."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lantern.generation.generator import generate
from lantern.models.folder import load_model
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model

Nodes = dict[str, Any]  # by name
FOLDER = Path(__file__).resolve().parents[2] / "integrations" / "comfyui"


INPUT = ("id", "display_name", "optional", "tooltip", "lazy", "extra_dict")
WIDGET = (*INPUT, "default", "socketless", "force_input")
OUTPUT = ("id", "display_name", "tooltip", "is_output_list")
NUMBER = ("min", "max", "step", "control_after_generate", "display_mode")


class Part:
    """An input or output, or a schema of them; its default is within its bounds or among its options."""

    names: tuple[str, ...] = ("node_id", "display_name", "category", "inputs", "outputs", "hidden", "description")

    def __init__(self, *id: str, default: Any = None, **given: Any) -> None:
        given |= dict(zip(self.names, id, strict=False)) | ({} if default is None else {"default": default})
        assert set(given) <= set(self.names), f"no argument {set(given) - set(self.names)}"
        assert default is None or given.get("min", default) <= default <= given.get("max", default)
        assert default is None or default in given.get("options", [default])
        self.default = default
        vars(self).update(given)


def kind(io_type: str, *names: str) -> type:
    """Return a type with its Input and Output; with `names` the input is a widget."""
    parts = {"Input": (*WIDGET, *names) if names else INPUT, "Output": OUTPUT}
    return type(io_type, (), {name: type(name, (Part,), {"names": taken}) for name, taken in parts.items()})


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args = args


IO = SimpleNamespace(
    Custom=kind,
    Image=kind("IMAGE"),
    String=kind("STRING", "multiline", "placeholder", "dynamic_prompts"),
    Int=kind("INT", *NUMBER),
    Float=kind("FLOAT", *NUMBER, "round"),
    Combo=kind("COMBO", "options", "control_after_generate"),
    Schema=Part,
    NodeOutput=NodeOutput,
    ComfyNode=type("ComfyNode", (), {}),
)
LATEST = SimpleNamespace(io=IO, ComfyExtension=type("ComfyExtension", (), {}))


class Bar:
    """Stands in for `comfy.utils.ProgressBar`; `shown` are the values of the last one."""

    shown: ClassVar[list[int]] = []

    def __init__(self, total: int) -> None:
        self.total = total
        self.shown.clear()

    def update_absolute(self, value: int, total: Any = None, preview: Any = None) -> None:
        assert 0 < value <= self.total
        self.shown.append(value)


def run(node: Any, **given: Any) -> tuple[Any, ...]:
    """Run a node with defaults for the inputs that are not given."""
    schema = node.define_schema()
    inputs = {one.id: given.pop(one.id, one.default) for one in schema.inputs}
    assert not given and node is not None, f"{schema.node_id} has no input {sorted(given)}"
    assert not [name for name in vars(node) if not callable(getattr(node, name)) and not name.startswith("_")]
    found = node.execute(**inputs)
    assert isinstance(found, NodeOutput) and len(found.args) == len(schema.outputs)
    return found.args


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    comfy = SimpleNamespace(model_management=SimpleNamespace(throw_exception_if_processing_interrupted=lambda: None))
    comfy.utils = SimpleNamespace(ProgressBar=Bar)
    apis = {"comfy_api": SimpleNamespace(), "comfy_api.latest": LATEST, "comfy": comfy}
    apis |= {f"comfy.{name}": api for name, api in vars(comfy).items()}
    for name, api in apis.items():
        monkeypatch.setitem(sys.modules, name, api)
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
        refused(run, found["LanternSample"], model=model, prompt=prompt, method="plain", match=message)


def test_a_run_shows_its_progress_and_can_be_interrupted(found: Nodes, folder: Path, monkeypatch: Any) -> None:
    (model,) = run(found["LanternLoad"], model=str(folder), engine="eager")
    monkeypatch.setattr("lantern_nodes.nodes.INTERVAL", 0.0)
    run(found["LanternSample"], model=model, method="plain", pictures=9)
    assert Bar.shown == [*range(8, 129, 8), *range(129, 145)]  # a batch of eight, and one of one

    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr(sys.modules["comfy.model_management"], "throw_exception_if_processing_interrupted", stop)
    with pytest.raises(InterruptedError):
        run(found["LanternSample"], model=model, method="plain")
    assert Bar.shown == []
