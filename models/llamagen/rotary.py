"""Two-dimensional rotary positions: the table, its factors, and the rotation."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rope_table(grid: int, prefix: int, head_dim: int, base: float) -> Float[Tensor, "p half 2"]:
    """Return the two-dimensional rotary table (cos, sin); its first `prefix` rows are ZERO, not the identity.

    Half the frequencies belong to the row, half to the column. Zero rows make queries and keys of every
    conditioning slot exactly zero, as in the released models.
    """
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(0, half, 2)[: half // 2].float() / half)
    angles = torch.outer(torch.arange(grid).float(), frequencies)
    rows = angles[:, None, :].expand(grid, grid, -1)
    columns = angles[None, :, :].expand(grid, grid, -1)
    factor = torch.cat([rows, columns], dim=-1).reshape(grid * grid, half)
    table = torch.stack([factor.cos(), factor.sin()], dim=-1)
    return torch.cat([torch.zeros(prefix, half, 2), table])


def rope_factors(table: Float[Tensor, "p half 2"], positions: Int[Tensor, "b n"]) -> Float[Tensor, "b n 3 1 half 2"]:
    """Return the factors of queries, keys and values at rows of the table: (cos, sin), and (1, 0) for values."""
    factor = table[positions].float()
    rest = torch.zeros_like(factor)
    rest[..., 0] = 1.0
    return torch.stack([factor, factor, rest], dim=2)[:, :, :, None]


def rotate(x: Float[Tensor, "b n k h d"], factors: Float[Tensor, "b n k 1 half 2"]) -> Float[Tensor, "b n k h d"]:
    """Rotate interleaved pairs (x[2i], x[2i+1]) as complex numbers; the result is fp32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if not torch.compiler.is_compiling():
        product = torch.view_as_complex(pairs) * torch.view_as_complex(factors)
        return torch.view_as_real(product).flatten(-2)
    even, odd = pairs.unbind(-1)  # the compiler fuses real arithmetic only
    cos, sin = factors.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
