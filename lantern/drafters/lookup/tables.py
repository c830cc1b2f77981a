"""Trained tables of SAM decoding: the super-token of each token, and a small corpus of images (arXiv:2411.10666)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.transformer import check_grid, check_limits

ROUNDS = 30  # of k-means
MAX_PICTURES = 1 << 16


@dataclass(frozen=True)
class SamConfig:
    """Tokens of the model and of an image, super-tokens, images in the corpus, digest of the target that made them.

    ValueError for a value out of range.
    """

    vocab_size: int
    block_size: int
    groups: int
    pictures: int
    kind: Literal["sam"] = "sam"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.vocab_size:
            raise ValueError(f"groups is {self.groups}, wanted from 1 to {self.vocab_size}")
        check_limits(self, "vocab_size", "block_size")
        check_grid(self.block_size)
        if not 0 <= self.pictures <= MAX_PICTURES:
            raise ValueError(f"pictures is {self.pictures}, wanted from 0 to {MAX_PICTURES}")


class SamTables(nn.Module):
    """The super-token of each token, and the tokens of some images that the target made."""

    group_of: Tensor
    corpus: Tensor

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("group_of", torch.zeros(config.vocab_size, dtype=torch.int32))
        self.register_buffer("corpus", torch.zeros(config.pictures, config.block_size, dtype=torch.int32))

    @classmethod
    def of_tokens(
        cls, tokens: Int[Tensor, "p n"], codebook: Float[Tensor, "v d"], *, groups: int, target: str | None = None
    ) -> "SamTables":
        """Cluster the codebook and keep the images."""
        made = cls(SamConfig(len(codebook), tokens.shape[1], groups, len(tokens), target=target))
        made.group_of.copy_(super_tokens(codebook, groups))
        made.corpus.copy_(tokens)
        return made


def super_tokens(codebook: Float[Tensor, "v d"], groups: int, seed: int = 0) -> Int[Tensor, " v"]:
    """Return the cluster of each token by k-means; the centre of an empty cluster does not move."""
    generator = torch.Generator().manual_seed(seed)
    points = codebook.detach().double().cpu()
    centres = points[torch.randperm(len(points), generator=generator)[:groups]].clone()
    nearest = torch.zeros(len(points), dtype=torch.long)
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=groups)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return nearest
