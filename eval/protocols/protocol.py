"""Evaluation protocols: everything that a published row of figures depends on, as a JSON file.

`load_protocol("coco2014-30k")` reads `eval/protocols/coco2014-30k.json`. Prompt sets of others are not shipped. They
are read from the given folder, else from `prompts` in the cache folder (`lantern.eval.metrics.weights.cache_folder`),
and must have the sha256 of the protocol.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from lantern.core.config import hint_for, load_config, shipped_folder
from lantern.core.io import sha256_of
from lantern.core.sampling import Sampling
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import cache_folder
from lantern.generation.requests import Request, read_prompts
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import SIZES

FOLDER = Path(__file__).resolve().parent
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class PromptSet:
    """A file of prompts: name, sha256, number of prompts, and origin.

    A "table" is tab-separated with a header that has a column prompt, caption or text; quotes are not special.
    ValueError for a file with a folder.
    """

    file: str
    sha256: str
    count: int
    origin: str
    form: Literal["lines", "table", "json"] = "lines"

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file or not self.file:
            raise ValueError(f"prompt file is {self.file!r}, wanted a name without a folder")


@dataclass(frozen=True)
class RealImages:
    """The reference images: name, number, and origin.

    `sha256` is that of a single file, the only one then accepted; None for a folder, or if the publisher gives none.
    """

    name: str
    images: int
    origin: str
    sha256: str | None = None


@dataclass(frozen=True)
class Protocol:
    """The settings that a row of figures fixes: images of `prompts` or of `classes` classes, `pictures_each` times.

    `sizes` are the allowed image sizes of a model in pixels. `guidance` applies to every model, or
    `guidance_by_model` to LlamaGen's sizes by name. Images and reference are resized to `evaluated_size` by `resize`
    (`resizing`) before each network's own resize. `source` is the paper or code of the figures; `departs`
    lists where this protocol differs from it. ValueError for contradictory fields.
    """

    name: str
    summary: str
    source: str
    sizes: tuple[int, ...]
    evaluated_size: int
    resize: Literal["none", "crop-lanczos", "bicubic"]
    metrics: tuple[str, ...]
    prompts: PromptSet | None = None
    classes: int = 0
    pictures_each: int = 1
    guidance: float | None = None
    guidance_by_model: Mapping[str, float] = field(default_factory=dict)
    guidance_interval: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    reference: RealImages | None = None
    departs: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"protocol name is {self.name[:40]!r}, wanted lower-case letters, digits and hyphens")
        if (self.prompts is None) == (self.classes < 1):
            raise ValueError("a protocol has prompts or classes: give one of them")
        if (self.guidance is None) == (not self.guidance_by_model):
            raise ValueError("a protocol has guidance or guidance_by_model: give one of them")
        if not self.sizes or min(*self.sizes, self.evaluated_size, self.pictures_each) < 1:
            raise ValueError("sizes, evaluated_size and pictures_each must be at least 1")
        for guidance in self.guidance_by_model.values() if self.guidance is None else [self.guidance]:
            self._sampling(guidance)

    @property
    def pictures(self) -> int:
        """Total number of images."""
        return (self.prompts.count if self.prompts else self.classes) * self.pictures_each

    @property
    def sampled(self) -> dict[str, Any]:
        """The fields that images depend on, besides the sampling settings."""
        prompts = self.prompts and self.prompts.sha256
        return {"prompts": prompts, "classes": self.classes, "pictures_each": self.pictures_each, "seed": self.seed}

    def sampling(self, model: Model) -> Sampling:
        """Return the sampling settings for a model; ValueError for a model without published guidance."""
        if self.guidance is not None:
            return self._sampling(self.guidance)
        config = model.target.config
        shape = {"dim": config.dim, "n_layer": config.n_layer, "n_head": config.n_head}
        size = next((name for name, one in SIZES.items() if one == shape), "of another size")
        if size not in self.guidance_by_model:
            known = ", ".join(f"{name} {value:g}" for name, value in self.guidance_by_model.items())
            raise ValueError(f"{self.name} has guidance for LlamaGen sizes {known}; {model.name} is {size}")
        return self._sampling(self.guidance_by_model[size])

    @property
    def resized(self) -> dict[str, Any]:
        """The options of a measurement by which images are resized."""
        text = "" if self.resize == "none" else f"{self.resize} to {self.evaluated_size}"
        return {"before": resizing(self.resize, self.evaluated_size), "resized": text}

    def check_model(self, model: Model) -> None:
        """Raise ValueError for a model that does not fit the protocol."""
        if model.takes_prompts != (self.prompts is not None):
            takes = "prompts" if model.takes_prompts else "class labels"
            own = "prompts" if self.prompts else "classes"
            raise ValueError(f"{self.name} is a protocol of {own}, but model {model.name} takes {takes}")
        if self.classes > (known := model.target.config.num_classes):
            raise ValueError(f"{self.name} has {self.classes} classes, model {model.name} has {known}")
        if model.vq is not None and (size := model.size[0]) not in self.sizes:
            expected = " or ".join(map(str, self.sizes))
            raise ValueError(f"{self.name} needs images of {expected} pixels, {model.name} makes {size}")

    def requests(self, prompts: list[str] | None = None) -> list[Request]:
        """Return the requests of all images in order, the subjects repeated; image i has noise key (seed, i)."""
        subjects = [Request(prompt=prompt) for prompt in prompts or ()]
        subjects += [Request(label=label) for label in range(self.classes)]
        numbered = enumerate(subjects * self.pictures_each)
        return [dataclasses.replace(subject, seed=self.seed, number=number) for number, subject in numbered]

    def _sampling(self, guidance: float) -> Sampling:
        shared = ("temperature", "top_k", "top_p", "guidance_interval")
        return Sampling(guidance=guidance, **{name: getattr(self, name) for name in shared})


def known_protocols() -> list[str]:
    """Return the names of the shipped protocols."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_protocol(name: str) -> Protocol:
    """Return the protocol of a name or of a .json file; ValueError for an unknown name or an invalid file."""
    known = known_protocols()
    if name not in known and not name.endswith(".json"):
        hint = hint_for(name, known, f"known are {', '.join(known)}, or the path of a .json file")
        raise ValueError(f'protocol "{name[:80]}" is unknown: {hint}')
    return load_config(Protocol, FOLDER / f"{name}.json" if name in known else name)


def find_prompts(expected: PromptSet, folder: Path | None = None) -> list[str]:
    """Return the prompts of a set; ValueError for a missing file, or one with another sha256 or count."""
    own, cached, digits = shipped_folder("assets", "prompts"), cache_folder() / "prompts", expected.sha256[:12]
    places = [own, cached] if folder is None else [folder, own]
    path = next((place / expected.file for place in places if (place / expected.file).is_file()), None)
    if path is None:
        lacking = f"{expected.file} (sha256 {digits}..., from {expected.origin}) is missing"
        raise ValueError(f"{lacking}: put it into {folder or cached}, or give its folder with --prompts")
    if (found := sha256_of(path)) != expected.sha256:
        raise ValueError(f"{path} has sha256 {found[:12]}..., wanted {digits}...: get it from {expected.origin}")
    prompts = read_prompts(str(path), ending={"lines": ".txt", "table": ".tsv", "json": ".json"}[expected.form])
    if len(prompts) != expected.count:
        raise ValueError(f"{path} has {len(prompts)} prompts, wanted {expected.count}: correct the protocol's count")
    return prompts


def resizing(name: str, size: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the resize of a protocol, which maps images (uint8, h w 3) to squares of `size` pixels.

    "none" is None: no resize before the network's own. "crop-lanczos" crops the central square and resizes it with
    Pillow's Lanczos filter, as in the evaluations of GigaGAN, LlamaGen and LANTERN. "bicubic" is PyTorch's without
    antialiasing, truncated to bytes, as in LlamaGen's evaluation of classes. An image of the right size is returned
    unchanged. "bicubic" raises ValueError for an image that is not square.
    """
    return None if name == "none" else partial({"crop-lanczos": _crop_lanczos, "bicubic": _bicubic}[name], size=size)


def _crop_lanczos(pixels: np.ndarray, *, size: int) -> np.ndarray:
    from torchvision.transforms.functional import center_crop

    square = center_crop(Image.fromarray(pixels), [min(pixels.shape[:2])])  # type: ignore[arg-type]
    return np.array(square.resize((size, size), Image.Resampling.LANCZOS))


def _bicubic(pixels: np.ndarray, *, size: int) -> np.ndarray:
    if pixels.shape[0] != pixels.shape[1]:
        raise ValueError(f"an image is {pixels.shape[1]} x {pixels.shape[0]}, wanted a square one")
    if pixels.shape[0] == size:
        return pixels
    found = torch.nn.functional.interpolate(raw(pixels)[None].float(), (size, size), mode="bicubic")
    return found[0].clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
