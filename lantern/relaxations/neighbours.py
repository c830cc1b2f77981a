"""Which codes are alike: the proximity table, and probability mass moved from a code's neighbours onto it.

LANTERN, arXiv:2410.03355: codes that lie near each other in the codebook decode to patches that look
alike, so a draft may claim the probability of its neighbours.
"""

from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from lantern.types import Moved

MAX_NEIGHBOURS = 1024
BLOCK = 256  # rows of distances at a time: no V x V matrix
TABLE_KEY = "neighbours"


def proximity_table(codebook: Float[Tensor, "v d"], k: int) -> Int32[Tensor, "v k"]:
    """The k nearest other codes of each code, nearest first, the lowest index among equals; L2 distance.

    Give the codebook as the decoder uses it: LlamaGen normalises codes at run time. ValueError for a k that is not
    from 1 to min(V - 1, 1024).
    """
    codes = len(codebook)
    if not 1 <= k <= min(codes - 1, MAX_NEIGHBOURS):
        raise ValueError(f"k is {k}, wanted from 1 to {min(codes - 1, MAX_NEIGHBOURS)} for {codes} codes")
    table = torch.empty(codes, k, dtype=torch.int32, device=codebook.device)
    wide = codebook.double()
    for first in range(0, codes, BLOCK):
        rows = torch.arange(first, min(first + BLOCK, codes), device=codebook.device)
        # Without the matrix-product shortcut equal codes have equal distances, to the last bit.
        distances = torch.cdist(wide[rows], wide, compute_mode="donot_use_mm_for_euclid_dist")
        distances[rows - first, rows] = torch.inf
        table[rows] = distances.sort(dim=1, stable=True).indices[:, :k].int()
    return table


def save_table(table: Int32[Tensor, "v k"], path: str | Path) -> None:
    """Writes a table as safetensors, aside first."""
    from safetensors.torch import save_file

    from lantern.io import atomic_write

    with atomic_write(path) as temporary:
        save_file({TABLE_KEY: table.cpu().contiguous()}, temporary, metadata={"format": "pt"})


def load_table(path: str | Path, vocab_size: int) -> Int32[Tensor, "v k"]:
    """Reads a table; ValueError names the file if it is torn, or not a table for a codebook of this size."""
    from lantern.io import load_tensors

    table = load_tensors(path).get(TABLE_KEY)
    if table is None or table.dtype != torch.int32 or table.ndim != 2 or len(table) != vocab_size:
        got = "nothing" if table is None else f"{table.dtype} {list(table.shape)}"
        raise ValueError(f"{path}: {TABLE_KEY} is {got}, wanted int32 with {vocab_size} rows")
    own = torch.arange(vocab_size)[:, None]
    if not table.shape[1] or bool(((table < 0) | (table >= vocab_size) | (table == own)).any()):
        raise ValueError(f"{path}: {TABLE_KEY} names codes outside the codebook, or a code as its own neighbour")
    return table


def longest_prefix(
    masses: Float[Tensor, "*n k"], budget: Float[Tensor, "*n"]
) -> tuple[Bool[Tensor, "*n k"], Float[Tensor, "*n"]]:
    """The longest run of nearest neighbours whose sum stays within the budget, and that sum."""
    sums = masses.double().cumsum(-1)
    is_taken = sums <= budget.double()[..., None]
    # The sum of nothing is 0, whatever k is.
    whole = torch.nn.functional.pad(torch.where(is_taken, sums, 0.0), (1, 0))
    return is_taken, whole.amax(-1).to(masses.dtype)


def move(
    p: Float[Tensor, "b v"], codes: Int[Tensor, " b"], near: Int[Tensor, "b k"], budget: Float[Tensor, " b"]
) -> Moved:
    """Moves the mass of the nearest neighbours within the budget onto each code."""
    is_taken, mass = longest_prefix(p.gather(1, near), budget)
    return Moved(near, is_taken, mass)


def refuse_as_published(
    p: Float[Tensor, "b v"], q: Float[Tensor, "b v"], codes: Int[Tensor, " b"], moved: Moved
) -> Float[Tensor, "b v"]:
    """max(p~ - q, 0), where p~ is p with the neighbourhood's mass moved onto the code."""
    kept = p.gather(1, moved.near).masked_fill(moved.is_taken, 0.0)
    relaxed = p.scatter(1, moved.near, kept)
    relaxed = relaxed.scatter_add(1, codes[:, None], moved.mass[:, None])
    return (relaxed - q).clamp(min=0.0)


def refuse_as_released(
    p: Float[Tensor, "b v"],
    q: Float[Tensor, "b v"],
    codes: Int[Tensor, " b"],
    around: Int[Tensor, "b k1"],
    moved: Moved,
    *,
    is_point: bool,
) -> Float[Tensor, "b v"]:
    """What the released code for LlamaGen does instead, where at least one neighbour was within the budget.

    All k + 1 nearest codes are concerned, not only those within the budget: sampled drafts set q to zero there (so
    that they keep their whole p), point drafts set p to zero there. A residual of nothing becomes uniform.
    """
    concerned = moved.is_taken.any(1, keepdim=True) & torch.ones_like(around, dtype=torch.bool)
    if is_point:
        emptied = p.scatter(1, around, p.gather(1, around).masked_fill(concerned, 0.0))
        left = emptied.scatter(1, codes[:, None], 0.0)
    else:
        left = (p - q.scatter(1, around, q.gather(1, around).masked_fill(concerned, 0.0))).clamp(min=0.0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, torch.ones_like(left))


def check_options(table: Int32[Tensor, "v k"], k: int, residual: str) -> None:
    """Refuses a neighbourhood that the table does not hold, and a residual rule that does not exist."""
    columns = table.shape[1] - (residual == "released")
    if not isinstance(k, int) or not 0 <= k <= columns:
        raise ValueError(f"k is {k}, wanted from 0 to {columns}: the proximity table has {table.shape[1]} columns")
    if residual not in ("paper", "released"):
        raise ValueError(f'residual is "{residual}", wanted "paper" or "released"')
