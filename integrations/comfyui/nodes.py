"""Two nodes in ComfyUI's V3 schema: load a model folder, and make pictures of a prompt.

Nodes have no state; the loaded model travels through the graph as a value of type LANTERN.
"""

import json

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import ComfyExtension, io

import lantern
from lantern.core.types import Step
from lantern.engines.engine import ENGINES
from lantern.generation.generator import INTERVAL
from lantern.generation.images import Picture
from lantern.generation.requests import MAX_EXACT_SEED
from lantern.models.folder import Model

LanternModel = io.Custom("LANTERN")
DEFAULT = "default"
METHODS = [DEFAULT, *(one.name for one in lantern.list_methods())]


class LanternLoad(io.ComfyNode):
    """Loads a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return inputs and outputs."""
        return io.Schema(
            node_id="LanternLoad",
            display_name="Lantern: load model",
            category="lantern",
            description="Loads a model folder of lantern or of transformers, or the embedded model.",
            inputs=[
                io.String.Input("model", default="lantern-emoji", tooltip="Name, folder or hub id."),
                io.Combo.Input("dtype", options=["auto", "fp32", "bf16", "fp16"], default="auto"),
                io.Combo.Input("engine", options=[*ENGINES], default="auto"),
            ],
            outputs=[LanternModel.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: str, dtype: str, engine: str) -> io.NodeOutput:
        """Return the model."""
        return io.NodeOutput(lantern.load_model(model, dtype=dtype, engine=engine))


class LanternSample(io.ComfyNode):
    """Makes pictures of a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return inputs and outputs."""
        return io.Schema(
            node_id="LanternSample",
            display_name="Lantern: prompt to picture",
            category="lantern",
            description="Makes pictures of a prompt, or of a class given as a number, with their statistics.",
            inputs=[
                LanternModel.Input("model"),
                io.String.Input("prompt", multiline=True, default="a red apple"),
                io.Int.Input("seed", default=0, min=0, max=MAX_EXACT_SEED, control_after_generate=True),
                io.Combo.Input("method", options=METHODS, default=DEFAULT),
                io.Float.Input(
                    "guidance", default=-1.0, min=-1.0, max=30.0, step=0.1, tooltip="Below 0: the model's own."
                ),
                io.Int.Input("pictures", default=1, min=1, max=64),
            ],
            outputs=[io.Image.Output(display_name="images"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, model: Model, prompt: str, seed: int, method: str, guidance: float, pictures: int
    ) -> io.NodeOutput:
        """Return pictures (b h w 3) in [0, 1] and their statistics as JSON, one line for each."""
        text = prompt.strip()
        if not model.takes_prompts and not text.isdecimal():
            raise ValueError(f"the prompt is {text[:40]!r}, and model {model.name} takes class labels: give a number")
        tokens, made = model.target.config.block_size, list[Picture]()
        bar = comfy.utils.ProgressBar(pictures * tokens)

        def watch(step: Step) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            bar.update_absolute(len(made) * tokens + int((step.start + step.counts).sum()))  # sync

        for picture in lantern.generate(
            model,
            [text if model.takes_prompts else int(text)] * pictures,
            seed=seed,
            method=None if method == DEFAULT else method,
            sampling=model.sampling(guidance=None if guidance < 0 else guidance),
            batch=min(pictures, 8),
            callback=watch,
            interval=INTERVAL,
        ):
            made.append(picture)
        images = torch.stack([one.pixels for one in made if one.pixels is not None]).float().cpu() / 255
        return io.NodeOutput(images, "\n".join(json.dumps(one.as_dict()) for one in made))


class LanternExtension(ComfyExtension):
    """The nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the classes of the nodes."""
        return [LanternLoad, LanternSample]
