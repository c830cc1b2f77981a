"""Shape of a LlamaGen transformer (arXiv:2406.06525), and the sizes that were released."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from lantern.core.types import Raster

# A config past these is a damaged file, not a model: refused before anything is allocated.
LIMITS = {
    "dim": 1 << 16,
    "ffn_dim": 1 << 18,
    "n_layer": 256,
    "n_head": 1024,
    "multiple_of": 1 << 16,
    "cls_token_num": 1 << 13,
    "vocab_size": 1 << 20,
    "caption_dim": 1 << 16,
    "num_classes": 1 << 20,
    "block_size": 1 << 16,
}


def check_limits(config: object, *names: str) -> None:
    """Raise ValueError for a field of a config that is below 1 or beyond LIMITS."""
    for name in names:
        if not 1 <= (value := getattr(config, name)) <= LIMITS[name]:
            raise ValueError(f"{name} is {value}, wanted from 1 to {LIMITS[name]}")


def check_layer(dim: int, n_head: int, rope_base: float, norm_eps: float) -> None:
    """Raise ValueError for heads that a rotary table cannot serve, a bad base of the table or epsilon of the norms."""
    if n_head < 1 or dim % n_head or (dim // n_head) % 4:
        raise ValueError(f"dim {dim} over {n_head} heads: wanted a head size divisible by 4")
    if not 1 < rope_base <= 1e9:
        raise ValueError(f"rope_base is {rope_base:g}, wanted above 1, at most 1e9")
    if not 0 < norm_eps < 1:
        raise ValueError(f"norm_eps is {norm_eps:g}, wanted above 0, below 1")


def check_grid(block_size: int) -> None:
    """Raise ValueError for a number of codes that is no square grid."""
    if block_size < 1 or math.isqrt(block_size) ** 2 != block_size:
        raise ValueError(f"block_size is {block_size}, wanted a perfect square (grid x grid codes)")


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a LlamaGen transformer, in the reference's field names.

    `block_size` is the number of codes of a picture, a perfect square; `cls_token_num` the number of
    conditioning slots (1 for classes, the caption length for text).
    """

    dim: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    token_dropout_p: float = 0.1
    attn_dropout_p: float = 0.0
    resid_dropout_p: float = 0.1
    ffn_dropout_p: float = 0.1
    class_dropout_prob: float = 0.1
    model_type: Literal["c2i", "t2i"] = "c2i"
    num_classes: int = 1000
    caption_dim: int = 2048
    cls_token_num: int = 1
    vocab_size: int = 16384
    block_size: int = 256

    def __post_init__(self) -> None:
        if self.model_type not in ("c2i", "t2i"):
            raise ValueError(f'model_type is "{self.model_type}", wanted "c2i" or "t2i"')
        check_grid(self.block_size)
        check_layer(self.dim, self.n_head, self.rope_base, self.norm_eps)
        if self.n_kv_head not in (None, self.n_head):
            raise ValueError(f"n_kv_head is {self.n_kv_head}, wanted {self.n_head}: grouped queries are in no release")
        check_limits(self, *(field.name for field in dataclasses.fields(self) if field.name in LIMITS))
        if self.ffn_dim_multiplier is not None and not 0 < self.ffn_dim_multiplier <= 64:
            raise ValueError(f"ffn_dim_multiplier is {self.ffn_dim_multiplier:g}, wanted above 0, at most 64")

    @property
    def grid(self) -> int:
        """Side of the square code grid."""
        return math.isqrt(self.block_size)

    @property
    def raster(self) -> Raster:
        """The square grid of codes, without newlines."""
        return Raster(self.grid, self.grid)

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_head

    @property
    def ffn_dim(self) -> int:
        """Hidden size of the SwiGLU feed-forward."""
        hidden = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return -(-hidden // self.multiple_of) * self.multiple_of

    @classmethod
    def named(cls, size: str, **changes: object) -> "TransformerConfig":
        """A released size (`SIZES`) with fields changed; unknown names are a ValueError that lists the known ones."""
        if size not in SIZES:
            raise ValueError(f'size is "{size}", wanted one of {", ".join(SIZES)}')
        return dataclasses.replace(cls(**SIZES[size]), **changes)  # type: ignore[arg-type]


SIZES: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "n_layer": 12, "n_head": 12},
    "L": {"dim": 1024, "n_layer": 24, "n_head": 16},
    "XL": {"dim": 1280, "n_layer": 36, "n_head": 20},
    "XXL": {"dim": 1536, "n_layer": 48, "n_head": 24},
    "XXXL": {"dim": 2560, "n_layer": 48, "n_head": 40},
    "1B": {"dim": 2048, "n_layer": 22, "n_head": 32},
    "3B": {"dim": 3200, "n_layer": 24, "n_head": 32},
    "7B": {"dim": 4096, "n_layer": 32, "n_head": 32},
}
