"""The material of model figures: a model, its training images, and the images it makes of sets of prompts."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.plain import generate
from lantern.eval.metrics.efficientnet import EfficientNet
from lantern.eval.metrics.reconstruction import PIXEL_BATCH, decode
from lantern.eval.metrics.retrieval import Gallery
from lantern.models.folder import RECOGNISED_NAME, Model, read_names
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.transformer import Transformer
from lantern.models.llamagen.vqvae import VQVAE, to_pixels
from lantern.training.data import Prepared, Record
from lantern.training.features import background_code, background_patches
from recipes.emoji.likelihood import EntropyMeter

STYLED_PROMPTS = 160


@dataclass(frozen=True)
class Prompts:
    """A named set of prompts, and the concept of each ("" for none); `by_name`: see `Study.condition`."""

    name: str
    texts: tuple[str, ...]
    concepts: tuple[str, ...]
    by_name: bool = False


@dataclass(frozen=True)
class Painting:
    """Pictures made of a set of prompts, and the entropy of the distributions along them."""

    codes: Int[Tensor, "n codes"]
    pictures: UInt8[Tensor, "n 3 h w"]
    entropy: EntropyMeter


@dataclass
class Study:
    """One run of figures. Values that several figures need are computed once, on first use.

    packages: folder with the wheel of the retrieval network. prompts: folder of the evaluation prompts. pictures:
    folder of contact sheets. limit: largest number of prompts of a set and of images to measure, 0 for all;
    reference images are not limited. batch: images made at a time.
    """

    model: Model
    prepared: Prepared
    packages: Path
    prompts: Path
    pictures: Path
    sampling: Sampling
    seed: int = 0
    limit: int = 0
    batch: int = 32

    def __post_init__(self) -> None:
        self._paintings: dict[tuple[str, Sampling], Painting] = {}

    @property
    def vq(self) -> VQVAE:
        """The model's tokenizer; ValueError if it has none."""
        if not isinstance(self.model.vq, VQVAE):
            raise ValueError(f"model {self.model.name} has no vqvae/ folder, which images need")
        return self.model.vq

    @property
    def target(self) -> Transformer:
        """The model's target; ValueError if it is not LlamaGen's."""
        if not isinstance(self.model.target, Transformer):
            raise ValueError(f"model {self.model.name} is not of LlamaGen's kind, whose losses are measured")
        return self.model.target

    @property
    def text(self) -> TextEncoder:
        """The model's text encoder; ValueError if it has none."""
        if not isinstance(self.model.text, TextEncoder):
            raise ValueError(f"model {self.model.name} has no text_encoder/ folder, which prompts need")
        return self.model.text

    @cached_property
    def images(self) -> UInt8[Tensor, "n 3 h w"]:
        """All prepared images."""
        return self.prepared.images()

    @cached_property
    def network(self) -> EfficientNet:
        """The network of retrieval."""
        return EfficientNet.from_package(self.packages).to(self.model.device)

    def records(self, split: str, kind: str | None = "plain") -> list[Record]:
        """Return the records of a split, of one kind or (None) of all; ValueError if there are none."""
        found = [r for r in self.prepared.records if r.split == split and kind in (None, r.kind)]
        if not found:
            raise ValueError(f"{self.prepared.folder} has no {kind or ''} images of split {split}: prepare it again")
        return found

    def some(self, items: Sequence, *, most: int = 0) -> list:
        """Return all items, or a random choice of at most `limit` and `most` (0 for no bound) in their order."""
        bounds = [bound for bound in (self.limit, most) if bound]
        if not bounds or len(items) <= min(bounds):
            return list(items)
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(self.seed))
        return [items[i] for i in sorted(order[: min(bounds)].tolist())]

    def images_of(self, records: Sequence[Record]) -> UInt8[Tensor, "n 3 h w"]:
        """Return the images of records."""
        return self.images[[r.image for r in records]]

    @torch.inference_mode()
    def encode(self, pictures: UInt8[Tensor, "n 3 h w"]) -> Int[Tensor, "n codes"]:
        """Encode images to codes, on the CPU."""
        device = self.model.device
        blocks = self.bar(pictures.split(PIXEL_BATCH), "encode")
        return torch.cat([self.vq.encode(to_pixels(block).to(device)).cpu() for block in blocks])

    @cached_property
    def background(self) -> int:
        """The code that training uses for white background: the most frequent one of all prepared images."""
        return background_code(self.encode(self.images), background_patches(self.images, self.vq.config.downsample))

    def training_codes(self, pictures: UInt8[Tensor, "n 3 h w"]) -> Int[Tensor, "n codes"]:
        """Encode images as for training of the target: white background gets one code."""
        codes, bare = self.encode(pictures), background_patches(pictures, self.vq.config.downsample)
        return codes.masked_fill(bare, self.background) if bool(bare.any()) else codes

    @torch.inference_mode()
    def features(self, pictures: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n c"]:
        """Return the retrieval network's features of images, on the CPU."""
        device = self.model.device
        blocks = self.bar(pictures.split(PIXEL_BATCH), "features")
        return torch.cat([self.network(block.to(device)).cpu() for block in blocks])

    @cached_property
    def gallery(self) -> Gallery:
        """The features of the plain training images."""
        records = self.records("train")
        concepts = tuple(dict.fromkeys(r.concepts[0] for r in records))
        number = {concept: i for i, concept in enumerate(concepts)}
        return Gallery(
            features=self.features(self.images_of(records)),
            labels=torch.tensor([number[r.concepts[0]] for r in records]),
            styles=tuple(r.style for r in records),
            concepts=concepts,
        )

    @cached_property
    def recognised(self) -> frozenset[str]:
        """The names whose images are recognised, by the list in the model's folder; empty without one."""
        path = None if self.model.folder is None else self.model.folder / RECOGNISED_NAME
        return frozenset(read_names(path)) if path is not None and path.is_file() else frozenset()

    def condition(self, texts: Sequence[str], *, by_name: bool = False) -> Condition:
        """Return the condition of prompts; with `by_name`, unknown words are replaced by names (`Model.read`)."""
        read = [self.model.read(text) if by_name else text for text in texts]
        found = self.text.encode(read, slots=self.model.target.config.cls_token_num)
        return Condition(embeddings=found.embeddings, mask=found.mask)

    def paint(self, prompts: Prompts, *, guidance: float | None = None) -> Painting:
        """Make one image of each prompt, with noise key (seed, index in the set); cached."""
        sampling = self.sampling
        if guidance is not None:
            sampling = dataclasses.replace(sampling, guidance=guidance)
        key = (prompts.name, sampling)
        if key not in self._paintings:
            self._paintings[key] = self._paint(prompts, sampling)
        return self._paintings[key]

    def _paint(self, prompts: Prompts, sampling: Sampling) -> Painting:
        meter, codes = EntropyMeter(sampling), []
        numbers = range(len(prompts.texts))
        for first in self.bar(range(0, len(numbers), self.batch), f"paint {prompts.name}"):
            part = numbers[first : first + self.batch]
            condition = self.condition([prompts.texts[i] for i in part], by_name=prompts.by_name)
            keys = [(self.seed, i) for i in part]
            made = generate(self.model.target, condition, sampling=sampling, keys=keys, callback=meter)
            codes.append(made.codes.cpu())
        grid = torch.cat(codes)
        return Painting(codes=grid, pictures=decode(self.vq, grid), entropy=meter)

    @staticmethod
    def bar(items: Iterable, name: str) -> Iterable:
        """Return the items with a progress bar, hidden if stderr is not a terminal."""
        from tqdm import tqdm

        return tqdm(items, desc=name, unit="batch", disable=None, leave=False)

    # sets of prompts

    def trained_prompts(self) -> Prompts:
        """Return every trained concept once, by its most frequent caption, which names no style."""
        first: dict[str, Record] = {}
        for record in self.records("train"):
            first.setdefault(record.concepts[0], record)
        chosen = self.some(list(first.values()))
        return Prompts("trained", tuple(usual_caption(r) for r in chosen), tuple(r.concepts[0] for r in chosen))

    def styled_cells(self) -> list[Record]:
        """Return a random choice of trained cells (concept and style)."""
        return self.some(self.records("train"), most=STYLED_PROMPTS)

    def styled_prompts(self) -> Prompts:
        """Return prompts of trained cells with their style."""
        chosen = self.styled_cells()
        return Prompts("styled", tuple(styled_caption(r) for r in chosen), tuple(r.concepts[0] for r in chosen))

    def heldout_prompts(self) -> Prompts:
        """Return prompts of held-out cells with their style: the concept is trained, the image is not."""
        chosen = self.some(self.records("heldout"))
        return Prompts("heldout", tuple(styled_caption(r) for r in chosen), tuple(r.concepts[0] for r in chosen))

    def synonym_prompts(self, *, by_name: bool = False) -> Prompts:
        """Return words that occur in no training caption, with the concept that they mean.

        ValueError for a file that is missing or of another form.
        """
        path = self.prompts / "synonyms.json"
        try:
            pairs = [(entry["prompt"], entry["concept"]) for entry in json.loads(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path}: {error}; expected a list of {{"prompt", "concept"}}') from error
        texts, concepts = zip(*self.some(pairs), strict=True)
        return Prompts("synonyms_by_name" if by_name else "synonyms", texts, concepts, by_name)

    def sheet_prompts(self) -> Prompts:
        """Return the prompts of the contact sheet. ValueError for a file that cannot be read."""
        path = self.prompts / "contact_sheet.txt"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; expected a file with one prompt per line") from error
        texts = self.some([line.strip() for line in lines if line.strip()])
        return Prompts("sheet", tuple(texts), ("",) * len(texts))


def usual_caption(record: Record) -> str:
    """Return the most frequent caption."""
    return max(record.captions, key=lambda caption: caption[1])[0]


def styled_caption(record: Record) -> str:
    """Return the concept with its style."""
    return f"{record.concepts[0]}, {record.style} style"
