"""A model on disk: one folder per component, and `model_index.json` with their names and the defaults of a call.

    model_index.json    the components, and under "generation" the defaults of a call
    transformer/        the target
    vqvae/              images from tokens
    text_encoder/ tokenizer/    for models that take prompts
    drafter/            EAGLE-1, which most methods use
    words.txt           the words of the training captions, if they are recorded
    names.txt           names of what the model generates, for prompts in other words (`lantern.models.llamagen.text`)
    recognised.txt      those of the names whose images are recognised
    parts/<name>/       add-ons: other drafters and policies, each read at its first use

Drafters and add-ons are checked against the target: by their sizes, and by the digest of the weights that they were
trained for. diffusers reads the same layout, but nothing here needs diffusers.

A folder with a `config.json` of its own is a model of transformers (`lantern.models.transformers`).
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from lantern.core.config import EMBEDDED_MODEL, build_config, read_json_object, resolve_model
from lantern.core.io import (
    CONFIG_NAME,
    FLOATING,
    SUMS_NAME,
    WeightsDigest,
    is_there,
    load_component,
    load_config,
    read_checksums,
    read_config,
    save_checksums,
    user_cache,
    verify_files,
    weights_digest,
    write_json,
    write_text,
)
from lantern.core.sampling import Sampling
from lantern.core.weights import PARTS, WeightCache, Weights, check_kind, outside_modes, quantize
from lantern.decoding.cache import PromptCache
from lantern.engines.engine import EAGER, Engine
from lantern.engines.engine import engine as make_engine
from lantern.methods import find
from lantern.methods.method import ADD_ONS, DRAFTER, AddOn
from lantern.models.llamagen.text import (
    NAMES_NAME,
    SHORT,
    STOP_WORDS,
    WORD,
    WORDS_NAME,
    Names,
    TextEncoder,
    named_emoji,
    read_names,
    read_words,
)
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_uint8
from lantern.models.transformers.components import Pixels, Prompts
from lantern.models.transformers.target import TargetSizes, TransformersTarget

_DIGESTS = WeightCache(lambda target: weights_digest(target.state_dict()))
WINDOWS_KEY = "tokens_per_step"  # in the index
INDEX_NAME = "model_index.json"
PROFILE_NAME = "profile.json"  # what `lantern tune` measured
Part = Literal["vq", "text", "drafter", "codebook"]
ALL_PARTS: frozenset[Part] = frozenset(("vq", "text", "drafter", "codebook"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLING_FIELDS = tuple(entry.name for entry in dataclasses.fields(Sampling))
# class names for diffusers: the pipeline's classes for our components, transformers' for the text encoder
LIBRARY = "lantern.generation.pipeline"
DOOR_NAME = "pipeline.py"
DOOR = '''"""Lets diffusers load this folder: DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)."""

from lantern import LanternPipeline  # noqa: F401
'''
CLASSES = {"transformer": "LanternTransformer", "vqvae": "LanternVQ", "drafter": "LanternDrafter"}
COMPONENTS = ("transformer", "vqvae", "text_encoder", "tokenizer", "drafter")
FOLDER = "parts"
ADVICE = "train one for it (lantern train --help lists the stages), or decode with --method plain"


@dataclass(frozen=True)
class Defaults(Sampling):
    """The defaults of a call in `model_index.json`.

    scale: how many times image files are as wide and high as the pixels of the model.
    """

    method: str = "auto"
    scale: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 1:
            raise ValueError(f"scale is {self.scale}, wanted at least 1")
        find(self.method)


@dataclass(frozen=True)
class Model:
    """The components of one model. Components that were not requested or that the model lacks are None.

    `generation` holds the model's defaults: fields of Sampling, "method" and "scale". `add_ons` holds drafters and
    policies by name. `tokens_per_step` are the mean tokens per step of `gumbel-jacobi` by window, {} if unknown.
    ValueError for components that do not fit each other.
    """

    name: str
    target: Transformer | TransformersTarget
    vq: VQVAE | Pixels | None = None
    text: TextEncoder | Prompts | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    prompts: PromptCache = field(default_factory=PromptCache)
    engine: Engine = EAGER
    add_ons: Mapping[str, nn.Module] = field(default_factory=dict)
    tokens_per_step: Mapping[int, float] = field(default_factory=dict)
    stored_digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", self.engine.resolve(self.target))  # of auto
        config, drafter = self.target.config, None if self.drafter is None else self.drafter.config
        if self.vq is not None and self.vq.config.codebook_size != config.vocab_size:
            where = "the VQ" if self.folder is None else self.folder / "vqvae"
            raise ValueError(f"{where} has {self.vq.config.codebook_size} tokens, the transformer {config.vocab_size}")
        if self.text is not None and self.takes_prompts and self.text.width != config.caption_dim:
            raise ValueError(f"the text encoder is {self.text.width} wide, the transformer needs {config.caption_dim}")
        if drafter is not None:
            check_sizes(drafter, config, drafter_name="the drafter", model_name=self.name)

    @property
    def drafter(self) -> Any:
        """The network of `ADD_ONS[DRAFTER]`; None if the model has none."""
        return self.add_ons.get(DRAFTER)

    @property
    def takes_prompts(self) -> bool:
        """Whether the model takes prompts; if not, it takes class labels."""
        return self.target.config.model_type == "t2i"

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.target.tok_embeddings.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target."""
        return self.target.tok_embeddings.weight.dtype

    @property
    def dtype_name(self) -> str:
        """Dtype of the target, as `--dtype` names it."""
        return next((name for name, dtype in DTYPES.items() if dtype == self.dtype), str(self.dtype))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image at scale 1, in pixels, of a model with a VQ tokenizer."""
        assert self.vq is not None
        raster, side = self.target.config.raster, self.vq.config.downsample
        return raster.rows * side, raster.columns * side

    @property
    def passes(self) -> str:
        """How passes are run, in words; `reproducible` is not named for fused passes, which always are."""
        words = {
            "fused": self.engine.name == "cpu",
            "graphed": self.engine.name == "graph",
            "reproducible": self.engine.is_wide,
            "in 4 bits": self.engine.weights == "int4",
            "in 8 bits": self.engine.weights == "int8",
            "with a KV cache in fp8": self.engine.is_fp8,
        }
        return ", ".join(word for word, holds in words.items() if holds) or "as torch runs them"

    @outside_modes
    def pictures(self, tokens: Int[Tensor, "b n"]) -> UInt8[Tensor, "b h w 3"]:
        """Return the images of tokens, decoded as the engine runs the VQ tokenizer; ValueError as `VQVAE.decode`."""
        assert self.vq is not None
        return to_uint8(self.engine.prepare_part(self.vq).decode(tokens))

    @property
    def codebook(self) -> Float[Tensor, "v d"] | None:
        """The tokens' vectors as the VQ decoder uses them; read from the folder if the VQ tokenizer was not loaded."""
        vq = self.vq
        if vq is None and self.folder is not None and (self.folder / "vqvae").is_dir():
            vq = load_component(VQVAE, VQConfig, self.folder / "vqvae")
        return None if vq is None else vq.codebook

    @cached_property
    def names(self) -> Names | None:
        """The names of what the model generates; None where its folder does not list names and words."""
        if self.folder is None or not self.words or not (self.folder / NAMES_NAME).is_file():
            return None
        assert isinstance(self.text, TextEncoder)
        return Names(self.text, self.words, read_names(self.folder / NAMES_NAME))

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the training captions; empty where the model's folder does not list them."""
        if self.folder is None or not isinstance(self.text, TextEncoder) or not (self.folder / WORDS_NAME).is_file():
            return frozenset()
        return frozenset(read_words(self.folder))

    def read(self, prompt: str) -> str:
        """Return what the text encoder reads of a prompt: unknown words are replaced by the nearest name."""
        return prompt if self.names is None else self.names.reading(prompt)

    def has_trained_word(self, prompt: str) -> bool:
        """Return whether a training caption has any word of a prompt; True where that cannot be told.

        Emoji characters count by their names. Words of one or two letters do not count.
        """
        found = [word for word in WORD.findall(named_emoji(prompt, lambda _: True).lower()) if len(word) > SHORT]
        return not self.words or not found or any(word in self.words for word in found)

    def untrained_words(self, prompt: str) -> list[str]:
        """Return the words of a prompt that no training caption has, [] where that cannot be told.

        A plural counts by its singular, a compound by its parts. Emoji characters, STOP_WORDS, numbers and words of one
        or two letters are left out.
        """
        known = self.words | STOP_WORDS

        def is_known(word: str) -> bool:
            return len(word) <= SHORT or any(word.removesuffix(end) in known for end in ("", "s", "es", "'s"))

        found = [word for word in dict.fromkeys(WORD.findall(prompt.lower())) if self.words and not word[0].isdigit()]
        return [word for word in found if not is_known(word) and not all(map(is_known, word.split("-")))]

    def missing(self, part: str) -> str:
        """Return in words that the model's folder lacks a component's folder, "" where it does not."""
        is_whole = self.folder is None or is_transformers_folder(self.folder) or is_there(self.folder / part)
        return "" if is_whole else f" ({self.folder}/{part} is missing)"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the names and bytes of all component files. ValueError for a model without a folder."""
        if self.folder is None:
            raise ValueError("a model that was assembled in memory has no files for a fingerprint")
        digest, others = hashlib.sha256(), (SUMS_NAME, PROFILE_NAME)
        is_whole = is_transformers_folder(self.folder)
        folders = [self.folder] if is_whole else [self.folder / name for name in COMPONENTS]
        for path in sorted(path for one in folders for path in one.glob("*") if path.is_file()):
            if path.name not in others:
                digest.update(f"{path.relative_to(self.folder).as_posix()}\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()

    @property
    def weights_digest(self) -> str:
        """The digest of the target's weights as they were stored."""
        return self.stored_digest or _DIGESTS.get(self.target)

    @property
    def scale(self) -> int:
        """How many times image files are as wide and high as the model's pixels, unless a call decides otherwise."""
        return int(self.generation.get("scale", 1))

    def sampling(self, **given: Any) -> Sampling:
        """Return the model's default sampling with the given fields that are not None; ValueError as of Sampling."""
        own = {name: value for name, value in self.generation.items() if name in SAMPLING_FIELDS}
        return Sampling(**own | {name: value for name, value in given.items() if value is not None})


def may_have_profile(folder: Path) -> bool:
    """Return whether `lantern tune` has written a profile into a model's folder, or any one into the user's cache."""
    cached = glob("*.json", root_dir=user_cache() / "profiles")  # nothing where it cannot be read
    return (folder / PROFILE_NAME).is_file() or not all(name.startswith("passes-") for name in cached)


@outside_modes
@torch.inference_mode(False)  # weights that are loaded in inference mode could not be used outside
def load_model(
    name: str | Path = EMBEDDED_MODEL,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    parts: Collection[Part] = ALL_PARTS,
    engine: str | Engine = "auto",
    verify: bool = True,
    size: tuple[int, int] | None = None,
    processes: int = 1,
) -> Model:
    """Load a model given by name, folder or hub id, ready for decoding.

    `parts` restricts the components to read beside the target; those that the model lacks are None. Device "auto" is a
    GPU if there is one; dtype "auto" is bf16 on a GPU and in the C++ engine, otherwise fp32. On a CPU the text encoder
    of a model in bf16 is in fp32. `engine` is how passes are run: an engine or its name; "auto" is the fastest one that
    is ready. `verify` compares weight files with their SHA-256 where the folder lists it, which reads every file once
    more. `size` is (height, width) in pixels, for models of transformers that make images of several sizes. With
    `processes`, those that `torchrun` started, each holds a share of the layers of a transformers model, and all of
    them make the same calls.
    ValueError names what is missing or invalid.
    """
    if unknown := {*parts} - ALL_PARTS:
        raise ValueError(
            f"parts are {', '.join(sorted(map(str, unknown)))}, wanted some of {', '.join(sorted(ALL_PARTS))}"
        )
    if size is not None and not (isinstance(size, tuple | list) and [*map(type, size)] == [int, int]):
        raise ValueError(f"size is {size!r:.40}, wanted (height, width) in pixels")
    where, folder = pick_device(device), resolve_model(name)
    chosen, shown = make_engine(engine), shown_name(name, folder)
    kind = pick_dtype(dtype, where, folder, chosen)
    without = () if "drafter" in parts else (DRAFTER,)
    of_add_ons: dict[str, Any] = {"model_name": shown, "verify": verify, "without": without}
    if is_transformers_folder(folder):
        from lantern.models.transformers.loading import load as load_transformers

        if processes > 1 and where.type == "cuda":  # the GPU with the number of this process
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        found = load_transformers(folder, where, kind, parts=parts, size=size, verify=verify, processes=processes)
        add_ons = AddOns(folder, found.target, size=size, **of_add_ons)
        return Model(**vars(found), name=shown, folder=folder, engine=chosen, add_ons=add_ons)
    if size is not None:
        raise ValueError(f"model {shown} makes images of one size: omit the size")
    if processes > 1:
        raise ValueError(f"model {shown} runs in one process, not by torchrun")
    index = read_index(folder)
    if not is_there(folder / "transformer"):
        raise ValueError(f"{folder} is not a model: it has no transformer/{CONFIG_NAME}")
    digest = WeightsDigest()
    how: dict[str, Any] = {"device": where, "dtype": kind, "verify": verify, "digest": digest}
    target = load_target(folder / "transformer", chosen.weights, **how)
    generation = check_generation(index.get("generation") or {}, source=folder / INDEX_NAME)
    add_ons = AddOns(folder, target, digest=digest.hexdigest(), **of_add_ons)
    add_ons.get(DRAFTER)  # refused before other components are read
    # not in bf16 on a CPU, where torch's products in it may be slower
    of_text = torch.float32 if where.type == "cpu" and kind == torch.bfloat16 else kind
    has_vq, has_text = (is_there(folder / name) for name in ("vqvae", "text_encoder"))
    return Model(
        name=shown,
        target=target,
        # the VQ decoder stays in fp32, as in the reference
        vq=load_component(VQVAE, VQConfig, folder / "vqvae", verify=verify, device=where)
        if has_vq and "vq" in parts
        else None,
        text=load_text_encoder(folder, where, of_text, verify=verify) if has_text and "text" in parts else None,
        generation=generation,
        folder=folder,
        engine=chosen,
        add_ons=add_ons,
        stored_digest=digest.hexdigest(),
        tokens_per_step=check_tokens_per_step(index.get(WINDOWS_KEY) or {}, source=folder / INDEX_NAME),
    )


def is_transformers_folder(folder: Path) -> bool:
    """Return whether a folder holds a whole model of transformers rather than components of ours."""
    return (folder / CONFIG_NAME).is_file() and not (folder / "transformer").is_dir()


def load_target(folder: Path, weights: Weights, **how: Any) -> Transformer:
    """Load a LlamaGen transformer, layer by layer, as `load_component` does.

    ValueError and ImportError as of `lantern.core.weights.quantized`.
    """
    check_kind(weights)

    def change(name: str, part: nn.Module) -> None:
        part.requires_grad_(False)
        if name.split(".")[0] in PARTS[weights]:
            quantize(name, part, weights)

    return load_component(Transformer, TransformerConfig, folder, change=change, **how)


def load_text_encoder(
    folder: Path, device: torch.device, dtype: torch.dtype, *, verify: bool = True, by_library: bool = False
) -> TextEncoder:
    """Load the text encoder and its tokenizer, as objects of transformers where needed or asked for by `by_library`."""
    if verify:
        verify_files(folder / "text_encoder", read_checksums(folder / "text_encoder"))
    load = TextEncoder.from_pretrained if by_library else TextEncoder.load
    return load(folder / "text_encoder", dtype=dtype).to(device)


def read_index(folder: Path) -> dict[str, Any]:
    """Read `model_index.json`; for a folder without one, describe its components."""
    if is_there(folder / INDEX_NAME):
        return read_json_object(folder / INDEX_NAME)
    return describe(folder)


def describe(folder: Path) -> dict[str, Any]:
    """Return the components of a folder in the form of `model_index.json`."""
    index: dict[str, Any] = {"_class_name": [Path(DOOR_NAME).stem, "LanternPipeline"]}
    for name in COMPONENTS:
        index[name] = [None, None]
        if (folder / name).is_dir():
            index[name] = [LIBRARY, CLASSES[name]] if name in CLASSES else ["transformers", _class_in(folder / name)]
    return index


def write_index(folder: str | Path, *, generation: Mapping[str, Any] | None = None) -> None:
    """Write the `model_index.json` of a folder of components; `generation` are the model's defaults for a call."""
    folder = Path(folder)
    found = check_generation(generation or {}, source="generation")
    for component in (*(folder / name for name in COMPONENTS), *sorted((folder / "parts").glob("*"))):
        if component.is_dir():
            save_checksums(component)
    write_json(folder / INDEX_NAME, describe(folder) | {"generation": dict(found)})
    write_text(folder / DOOR_NAME, DOOR)  # through which diffusers loads the folder as remote code


def check_tokens_per_step(values: Any, *, source: str | Path) -> dict[int, float]:
    """Return tokens per step by window from their JSON form, {"4": 2.4}; ValueError for other keys and values."""
    if not isinstance(values, Mapping):
        raise ValueError(f'{source}: "{WINDOWS_KEY}" is a {type(values).__name__}, wanted an object')
    for window, tokens in values.items():
        is_window = str(window).isdecimal() and int(window) >= 2
        if not is_window or not isinstance(tokens, int | float) or not 1 <= tokens <= int(window):
            raise ValueError(
                f'{source}: "{WINDOWS_KEY}" holds {str(window)[:20]!r}: {str(tokens)[:20]}, wanted a window of at least'
                " 2 tokens and the mean number that it commits, from 1 to all"
            )
    return {int(window): float(tokens) for window, tokens in values.items()}


def record_tokens_per_step(folder: Path, tokens: Mapping[int, float]) -> None:
    """Write the tokens per step by window into a model's index, for the choice of "auto" on any machine."""
    found = {str(window): round(value, 3) for window, value in sorted(tokens.items())}
    check_tokens_per_step(found, source=folder / INDEX_NAME)
    write_json(folder / INDEX_NAME, read_index(folder) | {WINDOWS_KEY: found})


def check_generation(values: Any, *, source: str | Path) -> Mapping[str, Any]:
    """Return generation defaults; ValueError for an unknown key, with the nearest one, and for an invalid value."""
    if not isinstance(values, Mapping):
        raise ValueError(f'{source}: "generation" is a {type(values).__name__}, wanted an object')
    build_config(Defaults, values, source=source)
    return values


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device of this name, "auto" for a GPU if there is one; ValueError if this machine lacks it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"(cpu|cuda)(?::(\d{1,3}))?", str(device))
    if not found:
        raise ValueError(f"device is {str(device)[:40]!r}, wanted auto, cpu, cuda or cuda:N")
    number = int(found[2] or 0)
    there = 1 if found[1] == "cpu" else torch.cuda.device_count()
    if number >= there:
        raise ValueError(f"device '{device}' is not on this machine, which has {there} of its kind; cpu always works")
    return torch.device(device)


def pick_dtype(
    dtype: str | torch.dtype, device: torch.device, folder: Path | None = None, engine: str | Engine = "auto"
) -> torch.dtype:
    """Return the dtype of this name, ours or torch's; "auto" is bf16, but on a CPU fp32 if `engine` does not run the
    model of `folder` in C++.

    ValueError for an unknown name, and for what is no dtype of weights.
    """
    if dtype in FLOATING:
        return dtype
    if dtype == "auto":
        is_narrow = device.type != "cpu"
        if not is_narrow and folder is not None and is_there(folder / "transformer"):
            config = load_config(TransformerConfig, folder / "transformer" / CONFIG_NAME)
            is_narrow = make_engine(engine).narrows(config)
        return torch.bfloat16 if is_narrow else torch.float32
    known = DTYPES | {str(kind).removeprefix("torch."): kind for kind in DTYPES.values()}
    if not isinstance(dtype, str) or dtype not in known:
        raise ValueError(f"dtype is {dtype!r:.40}, wanted auto, {', '.join(DTYPES)}")
    return known[dtype]


def shown_name(name: str | Path, folder: Path) -> str:
    """Return the name of a model for metadata and reports; it never contains a path."""
    is_name = not (isinstance(name, Path) or Path(name).is_dir())
    return str(name) if is_name else folder.resolve().name


def _class_in(folder: Path) -> str:
    """Return the transformers class of a text encoder's or tokenizer's folder, which may hold files of both."""
    if folder.name == "text_encoder":
        kind = str(read_json_object(folder / CONFIG_NAME).get("model_type", "t5"))
        return {"mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}.get(kind, "T5EncoderModel")
    path = folder / "tokenizer_config.json"
    own = read_json_object(path) if path.is_file() else {}
    return own.get("tokenizer_class", "PreTrainedTokenizerFast")


@dataclass(eq=False, repr=False)
class AddOns(Mapping[str, nn.Module]):
    """The add-ons of a model's folder, but those named in `without`, on the device of its target.

    ValueError at the first use of one of another kind or target, or of a drafter of other sizes. One that is itself a
    model of transformers makes images of the same `size`. `digest` is that of the target's stored weights, None to take
    it from the target.
    """

    folder: Path
    target: Transformer | TransformersTarget
    model_name: str
    verify: bool = True
    size: tuple[int, int] | None = None
    digest: str | None = None
    without: Collection[str] = ()
    loaded: dict[str, nn.Module] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have, such as those of quantized targets: what was read is read again."""
        return vars(self) | {"loaded": {}}

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, ADD_ONS)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether it was read or the folder has an entry for it; reading a damaged one raises ValueError."""
        if not isinstance(name, str) or name not in ADD_ONS or name in self.without:
            return False
        return name in self.loaded or is_there(self.folder / ADD_ONS[name].folder)

    def __getitem__(self, name: str) -> nn.Module:
        """The add-on of this name, read at its first use; KeyError if the model has none.

        It is on the device and in the dtype that its target has now, rotary factors excepted.
        """
        if name not in self:
            raise KeyError(name)
        if name not in self.loaded:
            self.loaded[name] = self._load(ADD_ONS[name], self.folder / ADD_ONS[name].folder)
        module, weight = self.loaded[name], self.target.tok_embeddings.weight
        return module.to(device=weight.device, dtype=weight.dtype)

    def _load(self, kind: AddOn, folder: Path) -> nn.Module:
        if kind.is_target and isinstance(self.target, TransformersTarget):  # a folder of transformers
            from lantern.models.transformers.loading import load

            weight = self.target.tok_embeddings.weight
            return load(folder, weight.device, weight.dtype, parts=(), size=self.size, verify=self.verify).target
        given = ADD_ONS.get(str(read_config(folder).get("kind")), kind)
        if given.config_path != kind.config_path:
            raise ValueError(f"{folder} holds {given.name}, wanted {kind.name}: it belongs into {given.folder}")
        module = load_component(kind.module, kind.config, folder, verify=self.verify)
        noun = "drafter" if kind.name == DRAFTER else "add-on"
        names = {"drafter_name": f"{noun} {folder}", "model_name": self.model_name}
        if kind.name == DRAFTER:
            check_sizes(module.config, self.target.config, **names)
        if not kind.is_target and module.config.target is not None:
            self.digest = self.digest or weights_digest(self.target.state_dict())
            check_digest(module.config.target, self.digest, **names)
        return module.requires_grad_(False)


def check_sizes(drafter: Any, target: TransformerConfig | TargetSizes, *, drafter_name: str, model_name: str) -> None:
    """Raise ValueError if the drafter has another codebook, width or grid than the target."""
    got, expected = (
        f"{sizes.vocab_size} tokens of width {sizes.dim}, {sizes.block_size} per image" for sizes in (drafter, target)
    )
    if got != expected:
        raise ValueError(
            f"{drafter_name} drafts {got}, but model {model_name} has {expected}:"
            f" it was trained for another one; {ADVICE}"
        )


def check_digest(digest: str | None, found: str, *, drafter_name: str, model_name: str) -> None:
    """Raise ValueError if a drafter was trained for weights of another `digest` than the target's; None passes."""
    if digest not in (None, found):
        raise ValueError(
            f"{drafter_name} was trained for a target of digest {digest[:12]}, but that of model {model_name}"
            f' is {found[:12]}: {ADVICE}; to use it anyway set "target" to null in its config.json'
        )
