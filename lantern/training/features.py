"""What a target learns from, computed once: codes of pictures and features of captions, cached on disk."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.io import atomic_write, load_tensors
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.vqvae import VQVAE, to_pixels
from lantern.training.data import Prepared


def fingerprint(paths: Iterable[Path]) -> str:
    """One sha256 over the contents of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cached(path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors from a safetensors file, computed and written when it is not there."""
    from safetensors.torch import save_file

    if not path.exists():
        tensors = compute()
        with atomic_write(path) as temporary:
            save_file(tensors, temporary)
    return load_tensors(path)


@torch.no_grad()
def encode_pictures(vq: VQVAE, prepared: Prepared, *, batch: int = 64) -> Int[Tensor, "n codes"]:
    """Codes of every prepared picture, int16."""
    device = next(vq.parameters()).device
    return torch.cat([vq.encode(to_pixels(x).to(device)).short().cpu() for x in prepared.images().split(batch)])


@dataclass(frozen=True)
class Captions:
    """Features of distinct captions: left-padded to `slots`, pads zero."""

    index: dict[str, int]
    features: Float[Tensor, "m t c"]
    mask: Bool[Tensor, "m t"]

    @classmethod
    @torch.no_grad()
    def encode(
        cls, encoder: TextEncoder, prepared: Prepared, path: Path, *, slots: int, batch: int = 256
    ) -> "Captions":
        """Encodes every caption of every record once; longer ones are cut at `slots` tokens."""
        texts = sorted({text for record in prepared.records for text, _ in record.captions})

        def compute() -> dict[str, Tensor]:
            blocks = [texts[i : i + batch] for i in range(0, len(texts), batch)]
            parts = [encoder.encode(block, slots=slots, batch_size=batch) for block in blocks]
            return {
                "features": torch.cat([p.embeddings.bfloat16() for p in parts]),
                "mask": torch.cat([p.mask for p in parts]),
            }

        tensors = cached(path, compute)
        return cls({text: i for i, text in enumerate(texts)}, tensors["features"], tensors["mask"].bool())
