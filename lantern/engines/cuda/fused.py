"""Products for few rows, each with what stands around it, so that a layer is six launches of about 100 programs.

A product of a few rows with a weight is bound by reading the weight. One program computes all rows for 16 or 32 outputs
and reads its part of the weight once, in large blocks with several blocks under way. Its warps split the inputs, and
their partial sums are added at the end in the order of the warps. A row is computed by the same operations for any
number of rows: tiles of 16 rows by 16 inputs by 8 outputs, over the inputs in order. More rows are more tiles.

    pair        norm, then query, key and value with their rotation and the write to the cache, or gate and up with SiLU
    single      output and down product with the residual sum, or the head

Weights are full, or int8 with one scale per output, which multiplies the sum.

A norm multiplies its input by the norm's weight before the product, and the product by the row's scale after it, so
that no program waits for a row's sum of squares. Programs that write a row's residual sum also write the sum of squares
of their columns (`squares`); who reads the row adds them in order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from lantern.engines.cuda.kernels import PART, is_interpreted, kernel, to_cache

MOST_ROWS = 64  # of a program; half as many for two products, whose sums would not fit the registers
OUTPUTS = PART  # of a program: one tile of tensor cores wide, twice for `pair`
SLICES = 4  # of the inputs, one for each warp
ROPE, SILU, RESIDUAL, PLAIN = 0, 1, 2, 3


@triton.jit
def added(total, left, right, IS_WIDE: tl.constexpr):
    """Add a product of tiles, input by input; the interpreter takes the bits of bf16 for integers."""
    if IS_WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def unpacked(weight, SCALE, X):
    """Return a block of a weight in the dtype of the rows: int8 weights have a scale."""
    return weight if SCALE is None else weight.to(tl.float32).to(X.dtype.element_ty)


@triton.jit
def scaled(total, SCALE, at, inside):
    """Multiply sums by the scales of their outputs."""
    return total if SCALE is None else total * tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)[None]


@triton.jit
def sum_of(x, ROWS: tl.constexpr):
    """Add the 16 columns of each row, neighbours first, then their sums.

    The order of `tl.sum` follows from how columns are divided among threads, which for few columns depends on the rows.
    """
    left, right = tl.split(tl.reshape(x, (ROWS, 8, 2)))
    left, right = tl.split(tl.reshape(left + right, (ROWS, 4, 2)))
    left, right = tl.split(tl.reshape(left + right, (ROWS, 2, 2)))
    left, right = tl.split(left + right)
    return left + right


@triton.jit
def scale_of(SQUARES, at, is_live, eps, INPUTS: tl.constexpr, PARTS: tl.constexpr, PARTS_SIZE: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of some rows.

    From 32 parts on each thread holds four of a row, whatever the number of rows, so that `tl.sum` has one order.
    """
    part = tl.arange(0, PARTS_SIZE)
    inside = is_live[:, None] & (part < PARTS)[None]
    squares = tl.load(SQUARES + at[:, None] * PARTS + part[None], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)


@kernel
def enter_kernel(INPUTS, X, SQUARES, rows, input_line, DIM: tl.constexpr, PART: tl.constexpr, PARTS_SIZE: tl.constexpr):
    """Copy an input to its row, with its sums of squares."""
    line, row = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, PARTS_SIZE)
    at = part[:, None] * PART + tl.arange(0, PART)[None]
    x = tl.load(INPUTS + line * input_line + row * DIM + at, mask=at < DIM, other=0.0)
    tl.store(X + (line * rows + row) * DIM + at, x, mask=at < DIM)
    wide = x.to(tl.float32)
    squares = SQUARES + (line * rows + row) * (DIM // PART) + part
    tl.store(squares, tl.sum(wide * wide, 1), mask=part < DIM // PART)


@kernel
def pair_kernel(
    X, WEIGHT, SCALE, NORM, SQUARES, OUT, TABLE, POSITIONS, SLOTS, CACHE,
    eps, count, rows, live, lines, slots, position_line,
    INPUTS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PARTS_SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr, DEPTH: tl.constexpr, MODE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Compute pairs of outputs, STEP * p and STEP * p + APART of the weight, from normed rows."""
    pair = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_live = lane < count
    line, node = lane // live, lane % live
    row = line * rows + node
    inside = pair < PAIRS
    inner = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None]
    x_at = X + row[None, :, None] * INPUTS + inner
    w_at = WEIGHT + (STEP * pair)[None, :, None] * INPUTS + inner
    left = tl.zeros((SLICES, ROWS, OUTPUTS), tl.float32)
    right = tl.zeros((SLICES, ROWS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, SLICES * DEPTH):
        has_x = is_live[None, :, None] & (start + inner < INPUTS)
        has_w = inside[None, :, None] & (start + inner < INPUTS)
        x = tl.load(x_at + start, mask=has_x, other=0.0)
        norm = tl.load(NORM + start + inner, mask=start + inner < INPUTS, other=0.0)
        first = tl.load(w_at + start, mask=has_w, other=0.0)
        second = tl.load(w_at + start + APART * INPUTS, mask=has_w, other=0.0)
        x = (x.to(tl.float32) * norm.to(tl.float32)).to(X.dtype.element_ty)
        left = added(left, x, tl.permute(unpacked(first, SCALE, X), (0, 2, 1)), IS_WIDE)
        right = added(right, x, tl.permute(unpacked(second, SCALE, X), (0, 2, 1)), IS_WIDE)
    scale = scale_of(SQUARES, row, is_live, eps, INPUTS, PARTS, PARTS_SIZE)[:, None]
    one = scaled(tl.sum(left, 0), SCALE, STEP * pair, inside) * scale
    two = scaled(tl.sum(right, 0), SCALE, STEP * pair + APART, inside) * scale
    kept = is_live[:, None] & inside[None]
    if MODE == 1:  # SILU
        gate, up = one.to(OUT.dtype.element_ty).to(tl.float32), two.to(OUT.dtype.element_ty).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(OUT + row[:, None] * PAIRS + pair[None], (opened * up).to(OUT.dtype.element_ty), mask=kept)
    else:
        half: tl.constexpr = WIDTH // 2
        kind, head, place = pair // (HEADS * half), (pair // half) % HEADS, pair % half
        position = tl.load(POSITIONS + line * position_line + node, mask=is_live, other=0)
        factors = TABLE + position[:, None] * WIDTH + 2 * place[None]
        turns = kept & (kind < 2)[None]
        cos = tl.load(factors, mask=turns, other=1.0)
        sin = tl.load(factors + 1, mask=turns, other=0.0)
        even, odd = one * cos - two * sin, two * cos + one * sin
        is_query = kept & (kind == 0)[None]
        q_at = OUT + row[:, None] * (2 * PAIRS) + (STEP * pair)[None]
        tl.store(q_at, even.to(OUT.dtype.element_ty), mask=is_query)
        tl.store(q_at + APART, odd.to(OUT.dtype.element_ty), mask=is_query)
        slot = tl.load(SLOTS + node, mask=is_live, other=0)
        base = ((kind - 1)[None] * lines + line[:, None]).to(tl.int64) * HEADS * slots * WIDTH
        c_at = CACHE + base + (head[None] * slots + slot[:, None]) * WIDTH + (STEP * place)[None]
        is_cached = kept & (kind > 0)[None]
        tl.store(c_at, to_cache(even, CACHE), mask=is_cached)
        tl.store(c_at + APART, to_cache(odd, CACHE), mask=is_cached)


@kernel
def single_kernel(
    X, WEIGHT, SCALE, OUT, SQUARES,
    count, rows, live,
    INPUTS: tl.constexpr, OUTPUTS_ALL: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, MODE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a weight, and add them to the rows of OUT, or write them to its rows, which are packed."""
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_live, inside = lane < count, column < OUTPUTS_ALL
    row = (lane // live) * rows + lane % live
    inner = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None]
    x_at = X + row[None, :, None] * INPUTS + inner
    w_at = WEIGHT + column[None, :, None] * INPUTS + inner
    total = tl.zeros((SLICES, ROWS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, SLICES * DEPTH):
        x = tl.load(x_at + start, mask=is_live[None, :, None] & (start + inner < INPUTS), other=0.0)
        w = tl.load(w_at + start, mask=inside[None, :, None] & (start + inner < INPUTS), other=0.0)
        total = added(total, x, tl.permute(unpacked(w, SCALE, X), (0, 2, 1)), IS_WIDE)
    made = scaled(tl.sum(total, 0), SCALE, column, inside)
    kept = is_live[:, None] & inside[None]
    if MODE == 2:  # RESIDUAL
        at = OUT + row[:, None] * OUTPUTS_ALL + column[None]
        x = tl.load(at, mask=kept, other=0.0).to(tl.float32) + made.to(OUT.dtype.element_ty).to(tl.float32)
        x = x.to(OUT.dtype.element_ty)
        tl.store(at, x, mask=kept)
        wide = tl.where(kept, x.to(tl.float32), 0.0)
        parts: tl.constexpr = (OUTPUTS_ALL + OUTPUTS - 1) // OUTPUTS
        tl.store(SQUARES + row * parts + tl.program_id(1), sum_of(wide * wide, ROWS), mask=is_live)
    else:
        tl.store(OUT + lane[:, None] * OUTPUTS_ALL + column[None], made.to(OUT.dtype.element_ty), mask=kept)


def spills(weight: Tensor) -> bool:
    """Return whether products of such a weight do not fit the registers: in fp32, for which cuBLAS is there."""
    return weight.itemsize == 4 and weight.device.type == "cuda" and not is_interpreted()


def tiling(inputs: int, count: int, *, operands: int) -> dict[str, Any]:
    """Return how the inputs of a product are divided, and how many blocks are under way.

    Only the number of blocks under way depends on the rows: it changes no sum. Every number of rows is compiled on its
    own, so the compiler may not join products and sums to FMAs: it could choose others for other rows.
    """
    # programs of the same outputs are neighbours: the second finds weights in L2
    rows = min(max(triton.next_power_of_2(count), 16), MOST_ROWS // operands)
    depth = 64 if inputs % (64 * SLICES) == 0 else 32
    block = SLICES * depth * 2 * (OUTPUTS * operands + rows)  # bytes
    stages = max(min(98304 // block, 6), 2)
    how = {"num_warps": SLICES, "num_stages": stages, "enable_fp_fusion": False, "IS_WIDE": is_interpreted()}
    return how | {"ROWS": rows, "OUTPUTS": OUTPUTS, "SLICES": SLICES, "DEPTH": depth}


def squares_of(x: Float[Tensor, "m c"]) -> Float[Tensor, "m p"]:
    """Return memory for the sums of squares of the parts of rows."""
    return x.new_empty(len(x), -(-x.shape[1] // PART), dtype=torch.float32)


def enter(
    inputs: Float[Tensor, "lines n c"], x: Float[Tensor, "m c"], squares: Float[Tensor, "m p"], *, rows: int
) -> None:
    """Copy inputs to the first rows of each line, with the sums of squares of their parts; lines may share memory."""
    lines, live, dim = inputs.shape
    assert inputs[0].is_contiguous()
    size = triton.next_power_of_2(-(-dim // OUTPUTS))
    enter_kernel[(lines, live)](
        *(inputs, x, squares, rows, inputs.stride(0)), DIM=dim, PART=OUTPUTS, PARTS_SIZE=size, num_warps=4
    )


def qkv(
    x: Float[Tensor, "m c"],
    weight: Float[Tensor, "c3 c"],
    norm: Float[Tensor, " c"],
    squares: Float[Tensor, "m p"],
    out: Float[Tensor, "m c3"],
    rope: Float[Tensor, "p half 2"],
    positions: Int[Tensor, "lines n"],
    slots: Int[Tensor, " n"],
    cache: Float[Tensor, "2 lines h s d"],
    *,
    scale: Float[Tensor, " c3"] | None = None,
    eps: float,
    rows: int,
) -> None:
    """Write rotated queries of normed rows to `out`, and rotated keys and values to their slots of the cache."""
    lines, heads, count, width = cache.shape[1:]
    live, dim = positions.shape[1], x.shape[1]
    _pair(
        *(x, weight, scale, norm, squares, out, rope, positions, slots, cache),
        *(eps, lines * live, rows, live, lines, count, positions.stride(0)),
        dim=dim, PAIRS=len(weight) // 2, STEP=2, APART=1, HEADS=heads, WIDTH=width, MODE=ROPE,
    )  # fmt: skip


def gate_up(
    x: Float[Tensor, "m c"],
    weight: Float[Tensor, "h2 c"],
    norm: Float[Tensor, " c"],
    squares: Float[Tensor, "m p"],
    out: Float[Tensor, "m h"],
    *,
    scale: Float[Tensor, " h2"] | None = None,
    eps: float,
    rows: int,
    live: int,
) -> None:
    """Write silu(gate) * up of normed rows to `out`."""
    lines, hidden, dim = len(x) // rows, len(weight) // 2, x.shape[1]
    _pair(
        *(x, weight, scale, norm, squares, out, x, x, x, x),
        *(eps, lines * live, rows, live, lines, 0, 0),
        dim=dim, PAIRS=hidden, STEP=1, APART=hidden, HEADS=1, WIDTH=2, MODE=SILU,
    )  # fmt: skip


def _pair(*given: Any, dim: int, **constants: int) -> None:
    count, parts = given[11], -(-dim // OUTPUTS)
    constants |= {"INPUTS": dim, "PARTS": parts, "PARTS_SIZE": max(triton.next_power_of_2(parts), 32)}
    how = tiling(dim, count, operands=2)
    pair_kernel[(-(-count // how["ROWS"]), -(-constants["PAIRS"] // OUTPUTS))](*given, **constants, **how)


def single(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "n k"],
    out: Float[Tensor, "m n"],
    squares: Float[Tensor, "m p"] | None,
    *,
    scale: Float[Tensor, " n"] | None = None,
    rows: int,
    live: int,
) -> None:
    """Add the product to the rows of `out`, with sums of squares; without `squares` write it to packed rows."""
    outputs, inputs = weight.shape
    count = len(x) // rows * live
    how = tiling(inputs, count, operands=1)
    single_kernel[(-(-count // how["ROWS"]), -(-outputs // OUTPUTS))](
        *(x, weight, scale, out, out if squares is None else squares, count, rows, live),
        INPUTS=inputs, OUTPUTS_ALL=outputs, MODE=PLAIN if squares is None else RESIDUAL, **how,
    )  # fmt: skip
