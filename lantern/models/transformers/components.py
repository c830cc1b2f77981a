"""What a family makes of a model of transformers: target, prompts, pixels and the defaults of a call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lantern.core.types import Condition, Raster
from lantern.models.llamagen.vqvae import check_tokens
from lantern.models.transformers.target import TransformersTarget

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # how transformers reads a folder


@dataclass(frozen=True)
class PixelConfig:
    """Sizes of a VQ decoder, under the names of `VQConfig`."""

    codebook_size: int
    downsample: int

    @classmethod
    def of(cls, config: Any) -> "PixelConfig":
        """Return the sizes in a config of Chameleon's or Janus's VQ tokenizer, which halves images between levels."""
        return cls(config.num_embeddings, 2 ** (len(config.channel_multiplier) - 1))


class Pixels(nn.Module, ABC):
    """A VQ tokenizer of transformers, for grids of one size; it stays in fp32.

    Its pixels are those that the model's image processor normalised, by 0.5 in each channel if there is no processor.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, vq: Any, config: PixelConfig, raster: Raster, processor: Any | None) -> None:
        super().__init__()
        self.vq, self.config, self.raster = vq, config, raster
        images = None if processor is None else processor.image_processor
        mean, std = (0.5, 0.5) if images is None else (images.image_mean, images.image_std)
        for name, values in (("scale", 2 * torch.tensor(std)), ("shift", 2 * torch.tensor(mean) - 1)):
            self.register_buffer(name, values.expand(3)[:, None, None].clone(), persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the decoder."""
        return self.codebook.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoder."""
        return self.codebook.dtype

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to a device; a dtype has no effect."""
        return super().to(torch._C._nn._parse_to(*args, **kwargs)[0])  # type: ignore[attr-defined]

    @property
    def codebook(self) -> Float[Tensor, "v d"]:
        """The tokens' vectors as the decoder uses them."""
        return self.vq.quantize.embedding.weight.detach()

    def read(self, folder: Path) -> None:
        """Read weights that the model's class does not hold; by default there are none."""

    def outline(self) -> None:
        """Make what `read` would, without values; by default there is nothing."""

    @abstractmethod
    def paint(self, grids: Int[Tensor, "b rows columns"]) -> Float[Tensor, "b 3 h w"]:
        """Decode grids of legal tokens to pixels as the processor normalised them."""

    @abstractmethod
    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels, as the processor normalises them, to tokens."""

    def encode(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b n"]:
        """Encode pixels in [-1, 1] to tokens in raster order."""
        return self.quantize((pixels - self.shift) / self.scale).flatten(1)

    def decode(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b 3 h w"]:
        """Decode tokens in raster order to pixels, nominally in [-1, 1]; ValueError for another number or tokens."""
        rows, columns = self.raster.rows, self.raster.columns
        if tokens.shape[1] != rows * columns:
            raise ValueError(f"got {tokens.shape[1]} tokens an image, wanted {rows} rows of {columns}")
        check_tokens(tokens, self.config.codebook_size)
        return self.paint(tokens.long().unflatten(1, (rows, columns))) * self.scale + self.shift


class Prompts(ABC):
    """Prompts as tokens of each guidance row, made by the model's processor."""

    width = 0  # it has no embeddings

    @abstractmethod
    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of the conditional and of the unconditional row of a prompt."""

    def condition(self, prompts: Sequence[str], *, slots: int = 0) -> Condition:
        """Return the condition of prompts; `slots`, which bounds captions of LlamaGen, has no effect."""
        rows = [torch.tensor(ids) for prompt in prompts for ids in self.rows(prompt)]
        padded = pad_sequence(rows, True, padding_side="left")
        mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in rows], True, padding_side="left")
        return Condition(tokens=padded.unflatten(0, (-1, 2)), mask=mask.unflatten(0, (-1, 2)))

    def knows(self, prompt: str) -> bool:
        """Return True: the tokenizers of these models spell every text."""
        return True

    def unread(self, prompt: str, slots: int) -> int:
        """Return 0: these models read whole prompts."""
        return 0

    def is_blank(self, prompt: str) -> bool:
        """Return whether a prompt says nothing."""
        return not prompt.strip()


class TextPrompts(Prompts):
    """A template around a prompt, `{}` in its place, and a fixed text of the unconditional row."""

    def __init__(self, tokenizer: Any, template: str, unconditional: str) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.unconditional = tokenizer(unconditional)["input_ids"]

    def rows(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt and of the unconditional row."""
        return self.tokenizer(self.template.replace("{}", prompt))["input_ids"], self.unconditional


def grid_of(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return rows and columns of tokens for (height, width) in pixels; ValueError unless both divide by `side`."""
    if any(pixels < side or pixels % side for pixels in size):
        raise ValueError(f"the size is {size[1]}x{size[0]}, wanted multiples of {side}")
    return size[0] // side, size[1] // side


def check_own_size(size: tuple[int, int] | None, side: int) -> None:
    """Raise ValueError for another (height, width) in pixels than that of a model with one size."""
    if size is not None and tuple(size) != (side, side):
        raise ValueError(f"the size is {size[1]}x{size[0]}, this model makes images of {side}x{side} only")


@dataclass(frozen=True)
class Components:
    """A model's parts, fields of `lantern.models.folder.Model`; `generation` are the defaults of a call."""

    target: TransformersTarget
    vq: Pixels
    text: Prompts | None
    generation: Mapping[str, Any]


def read_by(name: str, folder: Path) -> Any:
    """Return a folder's processor, read by the class of transformers of this name."""
    import transformers

    return getattr(transformers, name).from_pretrained(folder, **LOCAL)


@dataclass(frozen=True)
class Family:
    """How a family loads: transformers' class of the model, what reads the processor, what makes `Components` of both.

    `assemble` takes the model, its processor or None, and (height, width) in pixels or None. Families of causal
    language models are known by a `token` of the tokenizer, whose tokens those of images follow. Without `has_pixels`
    tokens are all that is made.
    """

    model: str
    processor: Callable[[Path], Any]
    assemble: Callable[[Any, Any | None, tuple[int, int] | None], Components]
    token: str = ""
    has_pixels: bool = True
