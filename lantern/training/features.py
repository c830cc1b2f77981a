"""Inputs of the target, computed once and cached on disk: tokens of images and features of captions.

The tokenizer's norms and attention see the whole image, so its tokens for a white background differ from image to
image: six nats of noise per token on a third of all tokens. A target learns to recognise a training image by that
noise and then ignores the caption. `unify_background` removes it: background patches get the one token that they have
most often.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from lantern.core.io import load_tensors, save_tensors, sha256_of
from lantern.core.types import Condition
from lantern.models.llamagen.text import TextEncoder, checked_folders
from lantern.models.llamagen.vqvae import VQVAE, to_pixels, to_uint8
from lantern.training.data import RECORDS, Prepared, Record

WHITE = 250  # darkest byte that counts as background
READ = {".safetensors", ".bin", ".json", ".model", ".txt"}  # files of text encoders and their tokenizers
MARGIN = 1  # pixels around a patch that must be background too
BATCH = 256  # captions that are encoded together


def cached(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Load tensors from a safetensors file, which is computed and written first if it is missing."""
    if not path.exists():
        save_tensors(compute(), path)
    return load_tensors(path)


def training_device() -> torch.device:
    """Return the device that this process trains on."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


@torch.no_grad()
def encode(vq: VQVAE, images: UInt8[Tensor, "n 3 h w"], *, batch: int = 64) -> Int[Tensor, "n tokens"]:
    """Return the tokens of images, on the CPU."""
    device = vq.quantize.embedding.weight.device
    return torch.cat([vq.encode(to_pixels(some).to(device)).cpu() for some in images.split(batch)])


@torch.no_grad()
def decode(vq: VQVAE, tokens: Int[Tensor, "n tokens"], *, batch: int = 64) -> UInt8[Tensor, "n 3 h w"]:
    """Return the images of tokens, on the CPU."""
    device = vq.quantize.embedding.weight.device
    return torch.cat([to_uint8(vq.decode(some.to(device))).permute(0, 3, 1, 2).cpu() for some in tokens.split(batch)])


def picture_tokens(
    vq: VQVAE, prepared: Prepared, *, vq_folder: Path, cache: Path, unify: bool
) -> Int[Tensor, "n tokens"]:
    """Return the tokens of all prepared images, optionally with one token for the background.

    They are cached in one file in `cache`, whose name depends on the tokenizer's weights and on the images; one in the
    prepared folder is used as well, and with it no images are needed. Token c of a background patch is stored as -1 -
    c.
    """
    weights = sha256_of(vq_folder / "model.safetensors")[:16]
    about = hashlib.sha256(f"{weights} {prepared.digest} signed".encode())
    name = f"tokens-{about.hexdigest()[:16]}.safetensors"

    def compute() -> dict[str, Tensor]:
        images = prepared.images()
        patches = torch.cat([background_patches(some, vq.config.downsample) for some in images.split(64)])
        kind = torch.int16 if vq.config.codebook_size <= 1 << 15 else torch.int32
        tokens = encode(vq.to(training_device()), images).to(kind)
        return {"tokens": torch.where(patches, -1 - tokens, tokens)}

    copied = prepared.folder / name
    stored = cached(copied if copied.is_file() else cache / name, compute)["tokens"]
    is_background = stored < 0
    tokens = torch.where(is_background, -1 - stored, stored)
    return tokens.masked_fill(is_background, background_token(tokens, is_background)) if unify else tokens


def captions_name(text_encoder: Path, tokenizer: Path | None, prepared: Prepared, *, slots: int) -> str:
    """Return the name of the file of caption features, which depends on all that they are made from."""
    digest = hashlib.sha256(str(slots).encode())
    found = {path for folder in checked_folders(text_encoder, tokenizer) for path in folder.iterdir()}
    read = sorted(path for path in found if path.suffix in READ)
    for path in (*read, prepared.folder / RECORDS):
        with path.open("rb") as file:  # in blocks, since an encoder may have gigabytes
            hashlib.file_digest(file, lambda: digest)
    return f"captions-{digest.hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class Conditions:
    """What the target is conditioned on: row `index[caption]` of `features` and `mask` for a caption.

    Features of captions are left-padded to a number of slots; padding is zero. Those of classes are their numbers, and
    `names` are the classes in this order.
    """

    index: dict[str, int]
    features: Float[Tensor, "m t c"] | Int[Tensor, " m"]
    mask: Bool[Tensor, "m t"]
    names: tuple[str, ...] = ()

    def readable(self, records: Sequence[Record]) -> list[Record]:
        """Return the records with those of their captions that have features; records without one are left out."""
        kept = [replace(one, captions=tuple(each for each in one.captions if each[0] in self.index)) for one in records]
        return [one for one in kept if one.captions]

    def of(self, texts: Sequence[str]) -> Condition:
        """Return the condition of captions."""
        rows = [self.index[text] for text in texts]
        return self.condition(self.features[rows], self.mask[rows])

    def condition(self, features: Tensor, mask: Bool[Tensor, "b t"]) -> Condition:
        """Return rows of `features` and `mask` as the condition of decoding."""
        return Condition(labels=features) if self.names else Condition(embeddings=features.float(), mask=mask)


def number_classes(prepared: Prepared) -> Conditions:
    """Number the concepts of prepared images by name; ValueError for an image that has not exactly one."""
    for record in prepared.records:
        if len(record.concepts) != 1:
            found = ", ".join(record.concepts) or "none"
            raise ValueError(f"{prepared.folder}: image {record.image} has the classes {found}, wanted one")
    names = tuple(sorted({record.concepts[0] for record in prepared.records}))
    index = {text: names.index(record.concepts[0]) for record in prepared.records for text, _ in record.captions}
    return Conditions(index, torch.arange(len(names)), torch.ones(len(names), 1, dtype=torch.bool), names)


@torch.no_grad()
def encode_captions(encoder: TextEncoder, prepared: Prepared, path: Path, *, slots: int) -> Conditions:
    """Encode every distinct caption once on the training device, cached in a file; cut at `slots` tokens.

    Captions of which cleaning leaves nothing, such as names of files, have no features. Warnings count these, and those
    that fill all slots. ValueError if none has features.
    """
    texts = sorted({text for record in prepared.records for text, _ in record.captions})

    def compute() -> dict[str, Tensor]:
        encoder.to(training_device())
        is_blank = torch.tensor([encoder.is_blank(text) for text in texts])
        given = ["a" if blank else text for text, blank in zip(texts, is_blank.tolist(), strict=True)]
        blocks = [given[i : i + BATCH] for i in range(0, len(given), BATCH)]
        parts = [encoder.encode(block, slots=slots, batch_size=BATCH) for block in blocks]
        return {
            "features": torch.cat([embeddings.bfloat16().cpu() for embeddings, _ in parts]),
            "mask": torch.cat([mask.cpu() for _, mask in parts]) & ~is_blank[:, None],
        }

    tensors = cached(path, compute)
    mask = tensors["mask"].bool()
    index = {text: i for i, (text, is_read) in enumerate(zip(texts, mask.any(1).tolist(), strict=True)) if is_read}
    if blank := [text for text in texts if text not in index]:
        line = f"{len(blank)} of {len(texts)} captions are empty once cleaned, such as {blank[0][:40]!r}"
        if not index:
            raise ValueError(f"{prepared.folder}: {line}: wanted words that the text encoder reads")
        print(f"warning: {line}: images without another one are left out", file=sys.stderr)
    if full := int(mask.all(1).sum()):
        line = f"{full} of {len(texts)} captions fill all {slots} slots; longer ones are cut"
        print(f"warning: {line}: raise slots in the target's config", file=sys.stderr)
    return Conditions(index, tensors["features"], mask)


def background_patches(pictures: UInt8[Tensor, "b 3 h w"], patch: int) -> Bool[Tensor, "b n"]:
    """Return which patches, in raster order, are white including their margin."""
    ink = (pictures.amin(1, keepdim=True) < WHITE).float()
    seen = F.max_pool2d(F.pad(ink, (MARGIN,) * 4), patch + 2 * MARGIN, patch)
    return (seen == 0).flatten(1)


def background_token(tokens: Int[Tensor, "b n"], is_background: Bool[Tensor, "b n"]) -> int:
    """Return the most frequent token of background patches; ValueError if there are none."""
    if not bool(is_background.any()):
        raise ValueError("no image has a white background: set unify_background to false in the config")
    return int(tokens[is_background].long().bincount().argmax())
