"""Text conditioning: a prompt becomes the left-padded embeddings and the mask that a LlamaGen transformer reads.

LlamaGen (arXiv:2406.06525) conditions on FLAN-T5-XL. Any T5-type encoder folder loads here, the small encoder of the
embedded model included; only the width of the embeddings and the number of `slots` differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.captions import clean_caption

T5_TYPES = ("t5", "mt5", "umt5")
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")


@dataclass(frozen=True)
class TextCondition:
    """What the transformer is told of each prompt, right-aligned in its slots.

    embeddings: (b, t, c), zero where the mask is false. mask: (b, t), true for words and the end token.
    """

    embeddings: Float[Tensor, "b t c"]
    mask: Bool[Tensor, "b t"]


def rotate_to_right(embeddings: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> TextCondition:
    """Turn right-padded rows into left-padded ones, with zeros in the padding.

    With two valid of four slots, `[a b . .]` becomes `[0 0 a b]`; the encoder itself has run right-padded, because
    its relative positions were trained that way. Raises ValueError for a mask that is not right-padded.
    """
    slots = mask.shape[1]
    count = mask.sum(1, keepdim=True)
    place = torch.arange(slots, device=mask.device)
    if not torch.equal(mask, place < count):
        raise ValueError("the mask has gaps; rotate_to_right wants each row's valid slots first")
    # Slot i of the result reads slot i + n of the source, around the end.
    source = (place + count) % slots
    turned = embeddings.gather(1, source[..., None].expand_as(embeddings))
    right = place >= slots - count
    return TextCondition(turned.masked_fill(~right[..., None], 0), right)


class TextEncoder:
    """A T5-type encoder with its tokenizer: a transformers encoder model and a transformers tokenizer."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, tokenizer_dir: str | Path | None = None, *, dtype: torch.dtype = torch.float32
    ) -> "TextEncoder":
        """Load from local files: an encoder folder that holds its tokenizer, or one with `tokenizer/` beside it.

        folder may also be the parent of `text_encoder/` and `tokenizer/` (the layout of diffusers). A folder with a
        whole T5 loads its encoder. Raises ValueError naming the file that is missing.
        """
        from transformers import AutoModelForTextEncoding, AutoTokenizer, logging

        weights, words = resolve_folders(Path(folder), None if tokenizer_dir is None else Path(tokenizer_dir))
        was = logging.get_verbosity()
        logging.set_verbosity_error()  # a whole T5's decoder weights are unused on purpose
        try:
            model = AutoModelForTextEncoding.from_pretrained(weights, local_files_only=True, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(words, local_files_only=True)
        finally:
            logging.set_verbosity(was)
        return cls(model, tokenizer)

    def save_pretrained(self, folder: str | Path, tokenizer_dir: str | Path | None = None) -> None:
        """Write model and tokenizer in the form that `from_pretrained` reads; one folder unless two are given."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder if tokenizer_dir is None else tokenizer_dir)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TextEncoder":
        """Move the model; returns self."""
        self.model.to(device=device, dtype=dtype)
        return self

    @property
    def width(self) -> int:
        """Channels of an embedding (2048 for FLAN-T5-XL)."""
        return self.model.config.d_model

    def encode(
        self,
        prompts: Sequence[str],
        *,
        slots: int = 120,
        clean: bool = True,
        allow_empty: bool = False,
        batch_size: int = 1,
    ) -> TextCondition:
        """Embeddings (b, slots, c) and mask of prompts, on the model's device and in its dtype.

        Long prompts are cut to `slots` tokens, the end token included. One prompt a pass keeps a prompt's embedding
        independent of its company, bit for bit; a larger `batch_size` is faster and agrees to rounding. A prompt of
        which cleaning leaves nothing is a ValueError unless `allow_empty`; it then consists of the end token alone.
        """
        captions = [self._caption(p, clean, allow_empty) for p in checked_prompts(prompts, slots, batch_size)]
        ids, mask = self._tokenize(captions, slots)
        rows = []
        with torch.no_grad():
            for some, valid in zip(ids.split(batch_size), mask.split(batch_size), strict=True):
                rows.append(self.model(input_ids=some, attention_mask=valid.long()).last_hidden_state)
        return rotate_to_right(torch.cat(rows), mask)

    def _caption(self, prompt: str, clean: bool, allow_empty: bool) -> str:
        caption = clean_caption(prompt) if clean else prompt
        if not caption.strip() and not allow_empty:
            shown = prompt if len(prompt) <= 40 else prompt[:37] + "..."
            why = "is empty" if not prompt.strip() else "is empty once cleaned"
            raise ValueError(f"prompt {shown!r} {why}; give a few words, such as 'a red apple'")
        return caption

    def _tokenize(self, captions: list[str], slots: int) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
        # Lone surrogates are no text that a tokenizer takes.
        plain = [c.encode("utf-8", "replace").decode("utf-8") for c in captions]
        self.tokenizer.padding_side = "right"
        out = self.tokenizer(
            plain, max_length=slots, padding="max_length", truncation=True, add_special_tokens=True, return_tensors="pt"
        )
        device = self.model.device
        return out["input_ids"].to(device), out["attention_mask"].to(device).bool()


def checked_prompts(prompts: Sequence[str], slots: int, batch_size: int) -> Sequence[str]:
    """The prompts, if there is at least one, in a list, and the sizes are positive; else a ValueError."""
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"got {prompts!r} as prompts, wanted a list of at least one")
    if slots < 1 or batch_size < 1:
        raise ValueError(f"got slots={slots}, batch_size={batch_size}, wanted both at least 1")
    return prompts


def resolve_folders(folder: Path, tokenizer_dir: Path | None) -> tuple[Path, Path]:
    """The folder of the weights and that of the tokenizer. Raises ValueError naming the file that is missing."""
    import json

    if (folder / "text_encoder").is_dir():
        folder = folder / "text_encoder"
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'} is missing; give the folder of a T5-type encoder")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in T5_TYPES:
        raise ValueError(f"{folder / 'config.json'} has model_type {kind!r}, wanted one of {', '.join(T5_TYPES)}")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ValueError(f"{folder / WEIGHT_FILES[0]} is missing; the folder holds no weights")
    beside = [tokenizer_dir] if tokenizer_dir else [folder, folder.parent / "tokenizer"]
    for words in beside:
        if any((words / name).is_file() for name in TOKENIZER_FILES):
            return folder, words
    raise ValueError(f"{beside[-1] / TOKENIZER_FILES[0]} is missing; give the tokenizer's folder as well")
