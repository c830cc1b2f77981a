"""A stand-in for the part of ComfyUI's `comfy_api` that node packs use, as of its V3 schema.

It refuses arguments that ComfyUI's classes lack, and calls a node as the executor does: with the inputs of its schema
by name, and one value for each output.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class Socket:
    io_type = ""


class Input(Socket):
    def __init__(self, id: str, display_name: str | None = None, optional: bool = False, tooltip: str | None = None,
                 lazy: bool | None = None, extra_dict: dict[str, Any] | None = None) -> None:  # fmt: skip
        self.id, self.optional = id, optional
        self.default: Any = None


class Output(Socket):
    def __init__(self, id: str | None = None, display_name: str | None = None, tooltip: str | None = None,
                 is_output_list: bool = False) -> None:  # fmt: skip
        self.id = id


class Widget(Input):
    names: tuple[str, ...] = ()

    def __init__(self, id: str, *, default: Any = None, **given: Any) -> None:
        own = {name: given.pop(name) for name in list(given) if name in (*self.names, "socketless", "force_input")}
        super().__init__(id, **given)
        self.default, self.options = default, own
        low, high = own.get("min", default), own.get("max", default)
        assert default is None or low is None or low <= default <= high
        assert "options" not in own or default in own["options"]


def kind(io_type: str, *names: str) -> type:
    """Return a type with its Input and Output; with `names` the input is a widget."""
    base = type("Input", (Widget,), {"names": names}) if names else Input
    members = {"Input": type("Input", (base,), {"io_type": io_type}), "Output": type("Output", (Output,), {})}
    members["Output"].io_type = io_type
    return type(io_type, (), members | {"io_type": io_type})


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    description: str = ""
    is_input_list: bool = False
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args = args


class ComfyNode: ...


class ComfyExtension: ...


def run(node: Any, **given: Any) -> tuple[Any, ...]:
    """Run a node with defaults for the inputs that are not given."""
    schema = node.define_schema()
    inputs = {one.id: given.pop(one.id, one.default) for one in schema.inputs}
    assert not given and node is not None, f"{schema.node_id} has no input {sorted(given)}"
    assert not [name for name in vars(node) if not callable(getattr(node, name)) and not name.startswith("_")]
    found = node.execute(**inputs)
    assert isinstance(found, NodeOutput) and len(found.args) == len(schema.outputs)
    return found.args


def modules() -> dict[str, ModuleType]:
    io, latest, package = ModuleType("comfy_api.latest.io"), ModuleType("comfy_api.latest"), ModuleType("comfy_api")
    number = ("min", "max", "step", "control_after_generate", "display_mode")
    io.__dict__.update(
        Custom=kind,
        Image=kind("IMAGE"),
        String=kind("STRING", "multiline", "placeholder", "dynamic_prompts"),
        Int=kind("INT", *number),
        Float=kind("FLOAT", *number, "round"),
        Combo=kind("COMBO", "options", "control_after_generate"),
        Schema=Schema,
        NodeOutput=NodeOutput,
        ComfyNode=ComfyNode,
    )
    latest.__dict__.update(io=io, ComfyExtension=ComfyExtension)
    package.__dict__.update(latest=latest)
    return {"comfy_api": package, "comfy_api.latest": latest}
