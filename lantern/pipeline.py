"""LanternPipeline: the whole model as a diffusers pipeline; a thin layer over `lantern.generate`.

pipe = LanternPipeline.from_pretrained("lantern-emoji")
pipe.method = "lantern++"
pipe("a red apple", generator=torch.Generator().manual_seed(7)).images[0].save("apple.png")
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

# diffusers knows a component by the ModelMixin that stands in the same module
from diffusers.models.modeling_utils import ModelMixin as ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils.outputs import BaseOutput
from jaxtyping import Int
from torch import Tensor

from lantern.catalog import Engine, find
from lantern.component import Component
from lantern.decoding.prefill import PromptCache
from lantern.drafters.eagle import Eagle, EagleConfig
from lantern.generate import Decoder, choose_method
from lantern.images import convert
from lantern.io import EMBEDDED_MODEL, HUB_PATTERNS, resolve_model
from lantern.memory import BatchSize
from lantern.model_folder import (
    INDEX_NAME,
    NEIGHBOURS_NAME,
    Model,
    check_generation,
    load_neighbours,
    read_index,
    shown_name,
)
from lantern.models.llamagen.config import TransformerConfig
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.transformer import Transformer
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.pairing import check_sizes, check_weights
from lantern.picture import Picture
from lantern.progress import Watcher, draw_watched
from lantern.relaxations.neighbours import save_table
from lantern.requests import CALLBACK_TENSORS, Request, check_call, check_requests, requests_of_call
from lantern.trained import TrainedParts

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


class LanternTransformer(Transformer, Component):
    """The target as a diffusers component."""

    config_class = TransformerConfig


class LanternDrafter(Eagle, Component):
    """A drafter as a diffusers component."""

    config_class = EagleConfig


class LanternVQ(VQVAE, Component):
    """The VQ tokenizer as a diffusers component, with the proximity table of its codes where there is one."""

    config_class = VQConfig
    neighbours: Tensor | None

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        self.register_buffer("neighbours", None, persistent=False)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, torch_dtype: torch.dtype | None = None, **others: Any
    ) -> "LanternVQ":
        """Load the folder, the table with it; always in fp32, as the reference decodes."""
        module: Any = super().from_pretrained(pretrained_model_name_or_path, **others)
        module.neighbours = load_neighbours(Path(pretrained_model_name_or_path), torch.device("cpu"))
        return module

    def save_pretrained(self, save_directory: str | Path, **others: Any) -> None:
        """Write the folder, the table with it."""
        super().save_pretrained(save_directory, **others)
        if self.neighbours is not None:
            save_table(self.neighbours, Path(save_directory) / NEIGHBOURS_NAME)


@dataclass
class LanternOutput(BaseOutput):
    """Pictures in the form that was asked for, their code grids `(b rows columns)`, and statistics of each."""

    images: Any
    tokens: Tensor
    stats: list[dict[str, Any]]


class LanternPipeline(DiffusionPipeline):
    """Text or class to picture by speculative decoding.

    `method` chooses how codes are decoded: "plain", "eagle1", "lantern", "lantern++" and what else the catalog has, or
    "auto", what `lantern tune` found fastest here. `engine` says how passes are run (`lantern.catalog.Engine`):
    set `pipe.engine = Engine(compile=True)` and call `pipe.warmup()`. `generation`: defaults of calls.
    """

    _optional_components: ClassVar[list[str]] = ["vqvae", "text_encoder", "tokenizer", "drafter"]
    _callback_tensor_inputs: ClassVar[list[str]] = list(CALLBACK_TENSORS)

    def __init__(
        self,
        transformer: LanternTransformer,
        vqvae: LanternVQ | None = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        drafter: LanternDrafter | None = None,
        generation: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, vqvae=vqvae, text_encoder=text_encoder, tokenizer=tokenizer, drafter=drafter
        )
        defaults = dict(check_generation(generation or {}, source=INDEX_NAME))
        self.register_to_config(generation=defaults)
        self._method = str(defaults.get("method", "auto"))
        self._interrupt = False
        self.engine = Engine()
        self._prompts = PromptCache()
        self._loaded: tuple[Path, Any, TrainedParts] | None = None  # from where, which target, and its other parts

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "LanternPipeline":
        """Load by name ("lantern-emoji"), folder or hub id; in fp32 unless `dtype` (or `torch_dtype`) says else."""
        name = pretrained_model_name_or_path
        hub = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
        if hub and str(name) != EMBEDDED_MODEL and not Path(name).is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(name), allow_patterns=list(HUB_PATTERNS), **hub))
        else:
            folder = resolve_model(name)
        asked = options.pop("torch_dtype", None) or options.pop("dtype", None) or torch.float32
        dtypes = asked if isinstance(asked, Mapping) else {"default": asked}
        options.setdefault("low_cpu_mem_usage", False)
        pipe = super().from_pretrained(str(folder), **options)
        if pipe.drafter is not None:
            names = {"drafter_name": f"drafter {folder / 'drafter'}", "model_name": shown_name(name, folder)}
            check_sizes(pipe.drafter.config, pipe.transformer.config, **names)
            check_weights(pipe.drafter.config, pipe.transformer, **names)
        for part in ("transformer", "text_encoder", "drafter"):
            module = getattr(pipe, part)
            if module is not None:
                torch.nn.Module.to(module, dtype=dtypes.get(part, dtypes.get("default", torch.float32)))
        parts = TrainedParts(folder, pipe.transformer, model_name=shown_name(name, folder))
        pipe._loaded = folder, pipe.transformer, parts
        pipe.register_to_config(_name_or_path=shown_name(name, folder))
        return pipe

    @classmethod
    def load_config(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Any:
        """Read model_index.json; a folder of components without one is described from what is in it."""
        folder = Path(pretrained_model_name_or_path)
        if folder.is_dir() and not (folder / INDEX_NAME).is_file():
            return read_index(folder)
        return super().load_config(str(folder), **options)

    @property
    def method(self) -> str:
        """How codes are decoded unless a call says otherwise; setting an unknown name is a ValueError."""
        return self._method

    @method.setter
    def method(self, name: str) -> None:
        self._method = find(name).name

    @property
    def interrupt(self) -> bool:
        """Whether the running call is to stop after the pass under way; set `_interrupt` from a callback."""
        return self._interrupt

    @property
    def model(self) -> Model:
        """The components as the core takes them."""
        encoder, tokenizer = self.text_encoder, self.tokenizer
        # another transformer than the one that was loaded has nothing to do with the folder
        folder, target, parts = self._loaded or (None, None, {})
        is_loaded = target is self.transformer
        return Model(
            name=str(self.config.get("_name_or_path") or "unnamed"),
            target=self.transformer,
            vq=self.vqvae,
            text=None if encoder is None or tokenizer is None else TextEncoder(encoder, tokenizer),
            drafter=self.drafter,
            neighbours=None if self.vqvae is None else self.vqvae.neighbours,
            generation=dict(self.config["generation"]),
            prompts=self._prompts,
            engine=self.engine,
            folder=folder if is_loaded else None,
            trained=parts if is_loaded else {},
        )

    def warmup(self, prompt: str = "a red apple", *, batch_size: int = 1, **call: Any) -> None:
        """Makes a batch and throws it away, so that later calls of this size compile nothing and do not read `prompt`.

        `call` are arguments of a call that change what is run: method, settings, guidance_scale and the like.
        """
        what: dict[str, Any] = {"prompt": [prompt] * batch_size} if self.model.takes_prompts else {}
        what = what or {"class_labels": [0] * batch_size}
        self(**what, generator=0, output_type="latent" if self.vqvae is None else "pt", **call)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | list[int] | None = None,
        *,
        guidance_scale: float | int | None = None,
        temperature: float | int | None = None,
        top_k: int | None = None,
        top_p: float | int | None = None,
        guidance_interval: int | None = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("codes", "known"),
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        debug: bool | None = None,
    ) -> LanternOutput | tuple[Any, ...]:
        """Make pictures of prompts, or of class labels.

        What is None is the model's own default. `generator` is a torch.Generator or a seed: picture i of a prompt then
        has the noise of (seed, i); or a list with one of these a picture. Only `initial_seed()` is read, so that the
        same generator gives the same pictures again, in any batch. `output_type`: "pil", "pt" (b 3 h w in [0, 1]),
        "np" (b h w 3 in [0, 1]) or "latent" (code grids). `settings` are the method's own, such as {"delta": 0.1}.
        `callback_on_step_end(pipe, step, timestep, {"codes": grids, "known": counts})` is called after every pass:
        timestep counts the codes that every picture of the batch has, `known` those of each, and codes to come are -1.
        `batch_size` limits what runs at once; where memory runs out it is halved, with a warning, and the failed batch
        begun again. With `debug` NotFiniteError names the layer that gave NaN.
        """
        check_call(output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt, batch_size)
        model, filters = self.model, {"top_k": top_k, "top_p": top_p, "temperature": temperature}
        sampling = model.sampling(guidance=guidance_scale, guidance_interval=guidance_interval, **filters)
        asked = requests_of_call(prompt, class_labels, num_images_per_prompt, generator)
        check_requests(model, asked)
        if output_type != "latent" and model.vq is None:
            raise ValueError('the pipeline has no vqvae, without which only output_type="latent" is possible')
        chosen = choose_method(model, method or self._method, settings, sampling=sampling)
        decoder = Decoder(model, chosen, sampling, size=BatchSize(batch_size or len(asked)), debug=debug)
        seen = callback_on_step_end, callback_on_step_end_tensor_inputs
        pictures = self._draw(decoder, asked, *seen, wants_pixels=output_type != "latent")
        return _output(pictures, output_type, return_dict)

    def _draw(
        self,
        decoder: Decoder,
        asked: Sequence[Request],
        callback: Callable[..., Any] | None,
        names: Sequence[str],
        *,
        wants_pixels: bool,
    ) -> list[Picture]:
        """All pictures, under diffusers' bar, until one sets `_interrupt`."""
        self._interrupt = False
        progress_bar: Any = self.progress_bar
        with progress_bar(total=len(asked) * decoder.model.target.config.block_size) as bar:
            return draw_watched(decoder, asked, Watcher(self, bar, callback, names), wants_pixels=wants_pixels)


def _output(pictures: list[Picture], output_type: str, return_dict: bool) -> LanternOutput | tuple[Any, ...]:
    side = round(len(pictures[0].codes) ** 0.5)
    tokens: Int[Tensor, "b h w"] = torch.stack([picture.codes for picture in pictures]).unflatten(1, (side, side))
    pixels = [picture.pixels for picture in pictures if picture.pixels is not None]
    images = tokens if output_type == "latent" else convert(torch.stack(pixels), output_type)
    stats = [picture.as_dict() for picture in pictures]
    found = LanternOutput(images=images, tokens=tokens, stats=stats)
    return found if return_dict else (found.images, found.tokens, found.stats)
