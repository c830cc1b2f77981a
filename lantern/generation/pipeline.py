"""LanternPipeline: a model as a diffusers pipeline, on top of `lantern.generation.generator`.

pipe = LanternPipeline.from_pretrained("lantern-emoji")
pipe.method = "lantern++"
pipe("a red apple", generator=torch.Generator().manual_seed(7)).images[0].save("apple.png")
"""

import inspect
import logging
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

# diffusers recognises a component by a ModelMixin in the same module
from diffusers.models.modeling_utils import ModelMixin as ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils.outputs import BaseOutput
from jaxtyping import Int
from torch import Tensor

from lantern.core.config import as_number, resolve_model
from lantern.core.io import (
    CONFIG_NAME,
    is_there,
    load_component,
    plain_name,
    read_config,
    save_component,
    weights_digest,
    write_json,
)
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.core.weights import outside_modes, weights_of
from lantern.decoding.cache import PromptCache
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.engines.engine import Engine
from lantern.engines.engine import engine as make_engine
from lantern.generation.choice import choose_method
from lantern.generation.generator import INTERVAL, Canvas, Decoder, Generator, Progress, make_batches, ready
from lantern.generation.images import MAX_SCALE, NotFiniteError, Picture, check_scale, convert, enlarge
from lantern.generation.requests import CALLBACK_TENSORS, check_call, requests_of_call, texts_of
from lantern.methods import find
from lantern.methods.method import ADD_ONS, DRAFTER, Method, check_same
from lantern.models import folder as folders
from lantern.models.folder import COMPONENTS, INDEX_NAME, Model
from lantern.models.llamagen.text import CLASSES_NAME, NAMES_NAME, RECOGNISED_NAME, WORDS_NAME, TextEncoder
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.models.transformers.components import Prompts

LOG = logging.getLogger("lantern")
INSTEAD = {"variant": "omit it, and give torch_dtype", "device_map": "omit it, and call pipe.to(device)"}
LISTS = (WORDS_NAME, NAMES_NAME, RECOGNISED_NAME, f"transformer/{CLASSES_NAME}")  # of a model's folder
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


class Component(ModelMixin):
    """Makes a plain module a diffusers component: a folder with config.json and model.safetensors."""

    config_class: ClassVar[type]
    source: Path | None = None  # the folder that it was loaded from

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, torch_dtype: torch.dtype | None = None, **others: Any
    ) -> "Component":
        """Load a component folder; `others`, diffusers' loading options, are ignored."""
        build: Any = cls
        module = load_component(build, cls.config_class, pretrained_model_name_or_path)
        module.source = Path(pretrained_model_name_or_path)
        return module.to(dtype=torch_dtype or torch.float32).requires_grad_(False)

    def save_pretrained(self, save_directory: str | Path, **others: Any) -> None:
        """Write the folder that `from_pretrained` and `lantern.models.folder.load_model` read."""
        save_component(self.state_dict(), self.config, save_directory)

    def to(self, *args: Any, **kwargs: Any) -> "Component":
        """Move the module as torch does; diffusers' own method warns about every dtype."""
        torch.nn.Module.to(self, *args, **kwargs)
        return self


class LanternTransformer(Transformer, Component):
    """The target as a diffusers component.

    For pipelines built of components it keeps the model that it was `loaded` with, whose folder has the add-ons, by its
    fields but the target; None for a transformer without a model. `digest` is that of the weights as stored.
    """

    config_class = TransformerConfig
    loaded: Mapping[str, Any] | None = None
    digest: str | None = None

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, torch_dtype: torch.dtype | None = None, **others: Any
    ) -> "LanternTransformer":
        """Load a component folder; what else belongs to its model is in the folder around it."""
        target: Any = super().from_pretrained(pretrained_model_name_or_path)
        folder = Path(pretrained_model_name_or_path).parent
        target.digest = weights_digest(target.state_dict())
        if is_there(folder / INDEX_NAME):
            target.loaded = fields_around(target, folder, folder.name)
        return target.to(dtype=torch_dtype or torch.float32)


def fields_around(target: Any, folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    """Return the fields, but the target, of the model in a folder: add-ons, tokens per step and others."""
    known = folders.read_index(folder).get(folders.WINDOWS_KEY) or {}
    tokens, digest = folders.check_tokens_per_step(known, source=folder / INDEX_NAME), getattr(target, "digest", None)
    add_ons: Any = folders.AddOns(folder, target, model_name=name, digest=digest, without=(DRAFTER,))
    own = {"name": name, "folder": folder, "add_ons": replace(add_ons, target=None), "stored_digest": digest or ""}
    return {**own, "tokens_per_step": tokens, **fields}


class LanternDrafter(Eagle, Component):
    """A drafter as a diffusers component."""

    config_class = EagleConfig


class LanternVQ(VQVAE, Component):
    """The VQ tokenizer as a diffusers component, which stays in fp32."""

    config_class = VQConfig

    def to(self, *args: Any, **kwargs: Any) -> "LanternVQ":
        """Move the module to a device; a dtype has no effect."""
        torch.nn.Module.to(self, torch._C._nn._parse_to(*args, **kwargs)[0])  # type: ignore[attr-defined]
        return self


def check_components(target: Any, drafter: Any, model_name: str) -> None:
    """Raise ValueError without a target, and for a drafter of another one.

    A target that was not loaded from a folder keeps the digest that its weights have at the first check.
    """
    if target is None:
        raise ValueError("transformer is None, wanted a LanternTransformer, as from_pretrained loads it")
    if drafter is None or target.config.family != "llamagen":
        return
    if drafter.config.target is not None and getattr(target, "digest", None) is None:
        target.digest = weights_digest(target.state_dict())
    source = getattr(drafter, "source", None)
    names = {"drafter_name": f"drafter {source}" if source else "the drafter", "model_name": model_name}
    folders.check_sizes(drafter.config, target.config, **names)
    folders.check_digest(drafter.config.target, getattr(target, "digest", None) or "", **names)


OWN: dict[str, type[Component]] = {"transformer": LanternTransformer, "vqvae": LanternVQ, "drafter": LanternDrafter}


def check_names(part: str, kind: Any, module: Any) -> None:
    """Raise ValueError for a module (None: no part) that lacks a weight which the folder of its `kind` has."""
    if module is None:
        return
    with torch.device("meta"):
        expected = kind(module.config).state_dict()
    if lacking := expected.keys() - map(plain_name, module.state_dict()):
        raise ValueError(f"{part} has no weight {min(lacking)!r}: merge adapters and remove parametrizations first")


def rounded_engine(engine: Engine | str, weights: str | None, kv_cache: str | None) -> Engine:
    """Return an engine with weights and cache of these kinds (None: its own); ValueError for unknown ones."""
    given: dict[str, Any] = {"weights": weights, "kv_cache": kv_cache}
    return replace(make_engine(engine), **{name: value for name, value in given.items() if value is not None})


@dataclass
class LanternOutput(BaseOutput):
    """Images in the requested form, their token grids `(b rows columns)`, and statistics of each."""

    images: Any
    tokens: Tensor
    stats: list[dict[str, Any]]


class LanternPipeline(DiffusionPipeline):
    """Text or class to image by speculative decoding.

    `method` is how tokens are decoded: "plain", "eagle1", "lantern", "lantern++" or another method of the registry, or
    "auto", the one that `lantern tune` found fastest here. Options may follow the name: "lantern++:k=5,lambda_=1.5".
    `engine` is how passes are run: a name or an Engine of `lantern.engines`, such as "eager" or "graph" (then call
    `pipe.warmup()`). `generation` holds defaults of calls, registered in `pipe.config`: fields of `Sampling`, "method"
    and "scale". None: those of the model that `from_pretrained` loaded `transformer` with; for another transformer
    those of `Sampling` (guidance 3, temperature 1), method "auto" and scale 1.
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
        if generation is None and self._loaded is not None:
            generation = dict(self._loaded.generation)
        defaults = dict(folders.check_generation(generation or {}, source=INDEX_NAME))
        self.register_to_config(generation=defaults)
        self._method = str(defaults.get("method", "auto"))
        self._interrupt = False
        self._engine_of_calls: Engine | str = "auto"
        self._prompts = PromptCache()
        # the decoder of the last call, whose rounds its engine has captured, with what it was built from
        self._kept: tuple[Any, Decoder] | None = None
        check_components(transformer, drafter, self._name)

    @classmethod
    def extract_init_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return diffusers' arguments of an index, without the tokens per step, which the transformer reads."""
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != folders.WINDOWS_KEY}, **kwargs)

    @classmethod
    @outside_modes
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "LanternPipeline":
        """Load by name ("lantern-emoji"), folder or hub id; in fp32 unless `dtype` (or `torch_dtype`) is given.

        `engine`, `weights` ("full", "int8", "int4") and `kv_cache` ("full", "fp8") set `pipe.engine`; ValueError for
        names that there are not.
        A folder of transformers takes `size`, (height, width) in pixels, if its model makes images of several.
        `variant` and `device_map` of diffusers are refused: there is one file of weights, and `to` moves the pipeline.
        """
        for option, instead in INSTEAD.items():
            if options.get(option) is not None:
                raise ValueError(f"{option} is {options[option]!r:.40}, which lantern does not have: {instead}")
        rounding = [options.pop(name, None) for name in ("weights", "kv_cache")]
        engine = rounded_engine(options.pop("engine", "auto"), *rounding)  # refused before anything is loaded
        name = pretrained_model_name_or_path
        hub = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
        folder = resolve_model(name, **hub)
        requested = options.pop("torch_dtype", None) or options.pop("dtype", None) or torch.float32
        given = requested if isinstance(requested, Mapping) else {"default": requested}
        dtypes = {part: folders.pick_dtype(dtype, torch.device("cpu")) for part, dtype in given.items()}
        dtypes.setdefault("default", torch.float32)
        shown = folders.shown_name(name, folder)
        if folders.is_transformers_folder(folder):
            pipe = cls._of_transformers(folder, folder if hub else name, dtypes, options)
        else:
            pipe = cls._of_components(folder, shown, dtypes, options)
        if options:
            LOG.warning("options that are not lantern's have no effect: %s", ", ".join(options))
        pipe.register_to_config(_name_or_path=shown)
        pipe.engine = engine
        return pipe

    @classmethod
    def _of_transformers(
        cls, folder: Path, name: str | Path, dtypes: Mapping[str, torch.dtype], options: dict[str, Any]
    ) -> "LanternPipeline":
        """Return the pipeline of a model of transformers, without the parts that are given as None, and without pixels
        where its family has none; ValueError for another part.
        """
        from lantern.models.transformers.loading import family_of

        parts = {part: options.pop(part) for part in COMPONENTS if part in options}
        if given := [part for part, one in parts.items() if one is not None]:
            raise ValueError(
                f"{given[0]} is given, but {folder} is a whole model of transformers: omit it, or give None"
            )
        left: set[Any] = {"drafter"} | ({"text"} if parts.keys() & {"text_encoder", "tokenizer"} else set())
        left |= {"vq"} if "vqvae" in parts or not family_of(folder).has_pixels else set()
        dtype, size = dtypes.get("transformer", dtypes["default"]), options.pop("size", None)
        model: Any = folders.load_model(name, parts=folders.ALL_PARTS - left, device="cpu", dtype=dtype, size=size)
        target, held = model.target, {"vq": None, "text": None, "add_ons": replace(model.add_ons, target=None)}
        target.loaded = {name: one for name, one in {**vars(model), **held}.items() if name != "target"}
        drafter: Any = None
        if "drafter" not in parts and is_there(folder / "drafter"):
            dtype = dtypes.get("drafter", dtypes["default"])
            drafter = LanternDrafter.from_pretrained(folder / "drafter", torch_dtype=dtype)
        vq: Any = None if "vq" in left else model.vq
        return cls(target, vq, model.text, drafter=drafter, generation=options.pop("generation", None))

    @classmethod
    def _of_components(
        cls, folder: Path, shown: str, dtypes: Mapping[str, torch.dtype], options: dict[str, Any]
    ) -> "LanternPipeline":
        """Return the pipeline of a folder of components, some of which may be given as options."""
        parts = {part: options.pop(part) for part in COMPONENTS if part in options}
        if "transformer" not in parts and not is_there(folder / "transformer"):
            raise ValueError(f"{folder} is not a model: it has no transformer/ folder")
        index, has_own_target = folders.read_index(folder), "transformer" not in parts
        generation = dict(folders.check_generation(index.get("generation") or {}, source=folder / INDEX_NAME))
        if is_there(folder / "text_encoder") and not {"text_encoder", "tokenizer"} <= set(parts):
            dtype = dtypes.get("text_encoder", dtypes["default"])
            text = folders.load_text_encoder(folder, torch.device("cpu"), dtype, by_library=True)
            parts = {"text_encoder": text.model, "tokenizer": text.tokenizer} | parts
        for part, kind in OWN.items():
            if part not in parts and is_there(folder / part):
                parts[part] = kind.from_pretrained(folder / part)
        check_components(parts["transformer"], parts.get("drafter"), shown)
        pipe = cls(**parts, generation=options.pop("generation", generation))
        if has_own_target or pipe._loaded is None:
            pipe.transformer.loaded = fields_around(
                pipe.transformer, folder, shown, generation=pipe.config["generation"]
            )
        for part in ("transformer", "drafter"):
            if (module := getattr(pipe, part)) is not None:
                torch.nn.Module.to(module, dtype=dtypes.get(part, dtypes["default"]))
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **options: Any) -> "LanternPipeline":
        """Return a pipeline with the components of another, and with its add-ons, method and engine.

        `dtype` changes the dtype of both, and `generation` has defaults in place of the other's, method included.
        """
        if isinstance(pipeline, LanternPipeline) and not options.keys() & {"dtype", "torch_dtype"}:
            given = {"generation": dict(pipeline.config["generation"]), **pipeline.components, **options}
            pipe: Any = cls(**given)
            pipe.register_to_config(_name_or_path=pipeline.config.get("_name_or_path"))
        else:
            pipe = super().from_pipe(pipeline, **options)
        if isinstance(pipeline, LanternPipeline):
            pipe.engine = pipeline.engine
            pipe._method = str((options.get("generation") or {}).get("method", pipeline._method))
        return pipe

    def save_pretrained(
        self, save_directory: str | Path, safe_serialization: bool = True, *others: Any, **options: Any
    ) -> None:
        """Write all components and add-ons, the index with the chosen method, checksums, `pipeline.py` for diffusers.

        Drafter and add-ons that were trained for the transformer are signed for it as it is saved, also where its
        weights were changed or rounded. With `push_to_hub`, `repo_id` and options of `push_to_hub` it is uploaded as
        well. ValueError without `safe_serialization`, for a drafter of another transformer, for a folder with parts
        that this pipeline lacks, for weights under other names, as in adapters, and for a model of transformers, which
        is saved by its own class.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization is False, which lantern does not have: omit it")
        if any(others) or options.get("variant") is not None:  # diffusers' third argument is the variant
            raise ValueError("variant is given, but there is one file of weights: omit it")
        if not str(save_directory):
            raise ValueError("save_directory is empty, wanted a folder")
        is_pushed, names = options.pop("push_to_hub", False), inspect.signature(self.push_to_hub).parameters
        hub: dict[str, Any] = {name: options[name] for name in names if name in options}
        if self.transformer.config.family != "llamagen":
            raise ValueError(f"{self.model.name} is a model of transformers: copy its folder, or save it by its class")
        check_components(self.transformer, self.drafter, self._name)
        for part, kind in OWN.items():
            check_names(part, kind, getattr(self, part))
        folder, defaults, own = Path(save_directory), dict(self.config["generation"]), self._beside()
        lacking = [part for part in COMPONENTS if getattr(self, part) is None]
        lacking += [path for path in (*(f"{folders.FOLDER}/{name}" for name in ADD_ONS), *LISTS) if path not in own]
        if found := [path for path in lacking if is_there(folder / path)]:
            raise ValueError(
                f"{folder} has {', '.join(found)}, which this pipeline lacks: remove it, or save to another folder"
            )
        self.register_modules(**self.components)  # diffusers forgets those that were None before
        super().save_pretrained(save_directory, True, *others, **options)
        self._save_add_ons(folder)
        chosen = {"method": self._method} if self._method != "auto" or "method" in defaults else {}
        folders.write_index(folder, generation=defaults | chosen)
        if self._loaded is not None and self._loaded.tokens_per_step:
            folders.record_tokens_per_step(folder, self._loaded.tokens_per_step)
        if is_pushed:
            hub.setdefault("repo_id", folder.resolve().name)
            self.push_to_hub(**hub)  # it saves all again, beside its model card

    def _beside(self) -> list[str]:
        """Return the paths of add-ons and lists in the folder of the transformer's model."""
        loaded = self._loaded
        if loaded is None or loaded.folder is None:
            return []
        lists = [name for name in LISTS if (loaded.folder / name).is_file()]
        return [*(f"{folders.FOLDER}/{name}" for name in loaded.add_ons), *lists]

    def _save_add_ons(self, folder: Path) -> None:
        """Copy add-ons and words; write the digest of the saved transformer into the configs that name that of ours."""
        if self._loaded is None or self._loaded.folder is None:
            return
        source, add_ons = self._loaded.folder, self._loaded.add_ons
        is_own = source.resolve() == folder.resolve()
        for path in [] if is_own else self._beside():
            if (source / path).is_dir():
                shutil.copytree(source / path, folder / path, dirs_exist_ok=True)
            else:
                shutil.copyfile(source / path, folder / path)
        digest = weights_digest(self.transformer.state_dict())
        stored = self.transformer.digest or digest
        for path in (folder / "drafter", *(folder / folders.FOLDER / name for name in add_ons)):
            if path.is_dir() and (config := read_config(path)).get("target") == stored:
                write_json(path / CONFIG_NAME, config | {"target": digest})
        if is_own:  # what was loaded is now what was saved
            self.transformer.digest = digest
            if self.drafter is not None and self.drafter.config.target == stored:
                self.drafter.config = replace(self.drafter.config, target=digest)
            kept = {name: getattr(self._loaded, name) for name in ("generation", "tokens_per_step")}
            self.transformer.loaded = fields_around(self.transformer, folder, self._name, **kept)

    @property
    def method(self) -> str:
        """The method of calls that do not name one; setting an unknown name or option raises ValueError."""
        return self._method

    @method.setter
    def method(self, spec: str) -> None:
        find(spec)
        self._method = spec

    @property
    def engine(self) -> Engine | str:
        """The engine of calls that do not name one; setting an unknown name raises ValueError."""
        return self._engine_of_calls

    @engine.setter
    def engine(self, engine: Engine | str) -> None:
        make_engine(engine)
        self._engine_of_calls = engine

    @property
    def interrupt(self) -> bool:
        """Whether the running call is to stop after the current pass; a callback sets `_interrupt`."""
        return self._interrupt

    @property
    def model(self) -> Model:
        """The components as a `lantern.models.folder.Model`."""
        return self._model(make_engine(self.engine))

    def _model(self, engine: Engine) -> Model:
        target, generation = self.transformer, {**self.config["generation"], "method": self._method}
        held: dict[str, Any] = {"prompts": self._prompts, "engine": engine, "generation": generation}
        check_components(target, self.drafter, self._name)
        loaded = self._loaded or Model(name="", target=target)
        add_ons: Any = loaded.add_ons
        if self.drafter is not None:
            add_ons = ChainMap({DRAFTER: self.drafter}, add_ons)
        text, tokenizer = self.text_encoder, self.tokenizer
        if not isinstance(text, Prompts):
            text = None if text is None or tokenizer is None else TextEncoder(text, tokenizer)
        return replace(
            loaded,
            name=self._name,
            target=target,
            vq=self.vqvae,
            text=text,
            add_ons=add_ons,
            **held,
        )

    @property
    def _loaded(self) -> Model | None:
        """The model that the transformer was loaded with."""
        target, fields = self.transformer, getattr(self.transformer, "loaded", None)
        if fields is None:
            return None
        return Model(target=target, **{**fields, "add_ons": replace(fields["add_ons"], target=target)})

    @property
    def _name(self) -> str:
        return str(self.config.get("_name_or_path") or (self._loaded.name if self._loaded else "unnamed"))

    @torch.no_grad()
    def tune(self, **how: Any) -> dict[str, Any]:
        """Measure the methods on this machine, as `lantern tune` does, and return the profile.

        `how` are arguments of `lantern.generation.tuning.tune`: images, batch, prompts, methods, out and others.
        Calls with method "auto" then use what the profile recommends.
        """
        from lantern.generation.tuning import tune

        return tune(self.model, **how)[0]

    def warmup(self, prompt: str = "a red apple", *, batch_size: int = 1, **call: Any) -> None:
        """Make a batch and discard it, so that the next call of this size compiles and captures nothing.

        `call` are arguments of later calls that change what is run, such as method, settings and guidance_scale.
        """
        what: dict[str, Any] = {"prompt": [prompt] * batch_size} if self.model.takes_prompts else {}
        what = what or {"class_labels": [0] * batch_size}
        self(**what, generator=0, output_type="latent" if self.vqvae is None else "pt", **call)

    @outside_modes
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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("tokens", "known"),
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        debug: bool | None = None,
        height: int | None = None,
        width: int | None = None,
        scale: int | None = None,
        resample: str = "lanczos",
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        engine: Engine | str | None = None,
        weights: str | None = None,
        kv_cache: str | None = None,
        init_image: Any = None,
        keep_rows: int | None = None,
        mask_image: Any = None,
        **options: Any,
    ) -> LanternOutput | tuple[Any, ...]:
        """Make images of prompts or of class labels.

        Arguments that are None take the model's default. `generator` is a torch.Generator or a seed, and image i of a
        prompt has the noise of (seed, i); or a list with one of these per image. Only `initial_seed()` is read, so a
        generator always gives the same images, in any batch, but for `ddd-paper`, `c2t-paper`, `radar-paper` and
        `adt-tree-paper`. `output_type` is "pil", "pt" (b 3 h w in [0, 1]), "np" (b h w 3 in [0, 1]) or "latent" (token
        grids). `callback_on_step_end(pipe, step, timestep, {"tokens": (b n), "known": counts})` is called after every
        pass: timestep is the number of tokens that every image of the batch has, `known` that of each image, and tokens
        still unknown are -1. `pipe._interrupt = True` in it ends the call after that pass: images of later batches are
        not returned, and those of the running one have 0 for missing tokens. `batch_size` limits how many images run at
        once; where memory runs out it is halved with a warning and the batch is repeated. With `debug` NotFiniteError
        names the layer that gave NaN.

        Options of the method are keywords (`tree="chain_4"`), or follow its name ("eagle1:tree=chain_4"), or are in
        `settings` ({"tree": "chain_4"}), as one must be that is named like an argument above, such as `width`.

        `scale` enlarges the images by `resample` ("lanczos" or "nearest"), 1 is the raw size, `pipe.size`; `height` and
        `width`, multiples of that size, are another way to give it. Images have no metadata, unlike files of
        `lantern-generate`.

        `prompt_embeds` (b slots channels) and `prompt_attention_mask` (b slots), as `encode_prompt` returns them, take
        the place of prompts. `negative_prompt`, a text or one for each prompt, takes the place of the model's
        unconditional caption in guidance; an empty one is that caption. `negative_prompt_embeds` are its embeddings.
        `engine`, `weights` ("full", "int8", "int4") and `kv_cache` ("full", "fp8") take the place of `pipe.engine` and
        its own in this call.

        `init_image`, a PIL image or a file of the raw size, gives the tokens of the first `keep_rows` rows, or those
        that `mask_image`, white where tokens are generated, does not cover (`generation.init_image`).
        """
        if isinstance(settings, Mapping):
            for name in settings.keys() & options.keys():
                check_same(name, settings[name], options[name])
        scale = self._scale(scale, resample, height, width)
        callback, names = callback_on_step_end, callback_on_step_end_tensor_inputs
        check_call(output_type, callback, names, num_images_per_prompt, batch_size)
        model = self._model(rounded_engine(self.engine if engine is None else engine, weights, kv_cache))
        filters = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
        sampling = model.sampling(guidance=guidance_scale, guidance_interval=guidance_interval, **filters)
        requested = requests_of_call(
            model,
            sampling,
            prompt=prompt,
            class_labels=class_labels,
            images=num_images_per_prompt,
            generator=generator,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            negative_prompt=negative_prompt,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
        )
        kept: dict[str, Any] = {"init_image": init_image, "keep_rows": keep_rows, "mask_image": mask_image}
        is_latent, batch = output_type == "latent", int(batch_size or len(requested))
        requested = ready(model, requested, with_pixels=not is_latent, **kept)
        settings = {**settings, **options} if isinstance(settings, Mapping) else settings or options
        chosen = choose_method(model, method, settings, sampling=sampling, batch=min(batch, len(requested)))
        how: dict[str, Any] = {"batch": batch, "debug": debug, "interval": 0.0 if callback else INTERVAL}
        built_from, made_by = self._generator(model, chosen, sampling, **how)
        tokens_of_image = model.target.config.block_size
        canvas, pictures = Canvas(tokens_of_image), list[Picture]()

        def watch(step: Step) -> bool:
            progress(step)
            if callback is not None:
                canvas.add(step)
                seen = {"tokens": canvas.tokens.clone(), "known": step.start + step.counts}
                callback(self, step.index, int(seen["known"].min()), {name: seen[name] for name in names})
            return self.interrupt

        made = make_batches(made_by, requested, with_pixels=not is_latent, callback=watch)
        bar: Any = self.progress_bar(total=len(requested) * tokens_of_image)  # type: ignore[call-arg]
        progress = Progress(len(requested), tokens_of_image, bar=bar)
        outer, self._interrupt = self._interrupt, False  # that of a call in whose callback this one is made
        try:
            with bar:
                for picture in made:
                    pictures.append(picture)
                progress.show()
        except NotFiniteError as error:
            error.sound = pictures
            raise
        finally:
            self._interrupt = outer
        if made_by.parts.engine.captures:
            self._kept = built_from, made_by.parts
        shape = (-1, pictures[0].columns)
        tokens: Int[Tensor, "b h w"] = torch.stack([picture.tokens for picture in pictures]).unflatten(1, shape)
        pixels = [picture.pixels for picture in pictures if picture.pixels is not None]
        images = tokens if is_latent else convert(enlarge(torch.stack(pixels), scale, resample), output_type)
        found = LanternOutput(images=images, tokens=tokens, stats=[picture.as_dict() for picture in pictures])
        return found if return_dict else (found.images, found.tokens, found.stats)

    def _generator(self, model: Model, method: Method, sampling: Sampling, **how: Any) -> tuple[Any, Generator]:
        """Return what a decoder is built from, and a generator, with the last call's decoder if that is the same."""
        kept, self._kept = self._kept, None  # a call within a callback has a decoder of its own
        if not model.engine.captures:
            return None, Generator(model, method, sampling, **how)
        # decoders whose rounds are captured are kept: they serve all samplings of one form
        modules = [model.target, model.vq, *(model.add_ons.get(name) for name in method.made.needs)]
        weights = [None if module is None else weights_of(module) for module in modules]
        built_from = (method, sampling.form, model.engine, how["debug"], weights)
        parts: dict[str, Any] = {"parts": kept[1]} if kept is not None and kept[0] == built_from else {}
        return built_from, Generator(model, method, sampling, **parts, **how)

    @property
    def size(self) -> int:
        """Height of an image in pixels, as the model was trained; 16 pixels a token where there is no VQ tokenizer."""
        return self.transformer.config.raster.rows * self._token_side

    @property
    def _token_side(self) -> int:
        return 16 if self.vqvae is None else self.vqvae.config.downsample

    def _scale(self, scale: int | None, resample: str, height: int | None = None, width: int | None = None) -> int:
        """Return the scale of the images; ValueError for an invalid scale, filter, height or width."""
        raw_width = self.transformer.config.raster.columns * self._token_side
        scale, height, width = map(as_number, (scale, height, width))
        for name, side, raw in (("height", height, self.size), ("width", width, raw_width)):
            if side is None:
                continue
            if scale is None and isinstance(side, int) and side in range(raw, raw * MAX_SCALE + 1, raw):
                scale = side // raw
            if scale is None or side != raw * scale:
                by = "a scale" if scale is None else f"the scale of {scale}"
                raise ValueError(f"{name} is {side}, wanted {raw} (the size of the model's images) times {by}")
        scale = int(self.config["generation"].get("scale", 1)) if scale is None else scale
        check_scale(scale, resample)
        return scale

    def enable_model_cpu_offload(self, *_: Any, **__: Any) -> None:
        """Raise ValueError: decoding calls parts of the transformer for every token."""
        raise ValueError(
            "offloading is not supported: every token needs the whole transformer on the device; to free the text "
            "encoder, keep encode_prompt's result and pass it as prompt_embeds"
        )

    enable_sequential_cpu_offload = enable_model_cpu_offload

    @outside_modes
    @torch.no_grad()
    def encode_prompt(self, prompt: str | list[str]) -> tuple[Tensor, Tensor]:
        """Return the text encoder's embeddings (b slots channels), left-padded, and their mask (b slots).

        ValueError without a text encoder and for a model that reads prompts as tokens.
        """
        text = self.model.text
        if text is None:
            raise ValueError("the pipeline has no text_encoder and tokenizer, without which it encodes no prompt")
        if not isinstance(text, TextEncoder):
            raise ValueError("this model reads prompts as tokens, not as embeddings: give the prompt to the call")
        return text.encode(texts_of(prompt, "prompt"), slots=self.transformer.config.cls_token_num)

    @outside_modes
    @torch.no_grad()
    def decode_latents(
        self, tokens: Tensor, output_type: str = "pil", *, scale: int | None = None, resample: str = "lanczos"
    ) -> Any:
        """Return the images of token grids (b rows columns), as `output_type="latent"` gives them.

        `output_type`: "pil", "pt" (b 3 h w in [0, 1]) or "np" (b h w 3 in [0, 1]). `scale` and `resample` are those of
        a call. ValueError for tokens out of range and for grids of another size than the model's; TypeError for what is
        no tensor of whole numbers.
        """
        scale = self._scale(scale, resample)
        if self.vqvae is None:
            raise ValueError("the pipeline has no vqvae, without which tokens are not decoded")
        if output_type not in ("pil", "pt", "np"):
            raise ValueError(f"output_type is {output_type!r}, wanted pil, pt or np")
        raster = self.transformer.config.raster
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
            got = str(tokens.dtype) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens are {got}, wanted a tensor of whole numbers")
        if tokens.ndim != 3 or tokens.shape[1:] != (raster.rows, raster.columns) or not len(tokens):
            wanted = f"[b, {raster.rows}, {raster.columns}], b at least 1"
            raise ValueError(f"tokens have shape {list(tokens.shape)}, wanted {wanted}")
        pixels = self.model.pictures(tokens.flatten(1).to(self.vqvae.device))
        return convert(enlarge(pixels, scale, resample), output_type)
