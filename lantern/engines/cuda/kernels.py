"""The Triton kernels of a pass, and the functions that launch them.

A pass has the same number of rows for every line (guidance row of an image): `rows`, of which the first `live` hold
nodes. Kernels compute those alone. Each row is computed by the same operations in the same order, whatever stands in
the other rows: one program computes one row, or a row of a tile of fixed size.

Attention groups keys by their position in the image, not by their slot in the cache. Block j holds the positions
`block * j` to `block * (j + 1) - 1`; its partial result (maximum, sum, weighted values) is computed on its own, and
`combine` adds partial results in the order of positions. Column c of a block is the same position in every pass, so a
node's result does not depend on whether an ancestor is committed or staged, nor on the slot where it is staged.

The prompt of LlamaGen is one value with keys of zeros. Other prompts have keys: further blocks, of the prompt's own
tokens, so that padding does not change results either.

With TRITON_INTERPRET=1 in the environment at the first import of triton the kernels run on CPU tensors.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton import knobs

from lantern.core.sampling import HeldSampling, Sampling
from lantern.decoding.cache import StaticCache

BLOCK = 64  # positions of a block of keys
TILE = 16  # rows of a tile: the smallest that tensor cores multiply
PART = 16  # columns of one sum of squares, and outputs of a program of `fused`
LANES = 1024  # columns of one program of `silu_mul`
WARPS = 4
# Numbers on whose value the code of a kernel must not depend: a pass of one node runs the code of a pass of many.
NUMBERS = (
    *("rows", "live", "lines", "slots", "guided", "blocks", "parts", "prefix", "conditioning", "mask_line", "mask_row"),
    *("position_line", "input_line"),
    *("count", "nodes", "positions", "width", "interval", "places_stride", "place_stride", "grid_stride"),
    *("depth", "near", "columns", "far_columns", "lanes", "tree_stride", "rank_stride", "depth_stride"),
    *("image_stride", "row_stride", "values_stride"),
)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which takes tensors on a CPU."""
    return bool(knobs.runtime.interpret)


def unfused() -> dict[str, Any]:
    """Return how a kernel is compiled that rounds products before they are added, as torch rounds them."""
    return {} if is_interpreted() else {"enable_fp_fusion": False}


def kernel(function: Callable[..., None]) -> Any:
    """Return the kernel of a function; what is compiled does not depend on the values of NUMBERS."""
    names = [name for name in inspect.signature(function).parameters if name in NUMBERS]
    return triton.jit(do_not_specialize=names)(function)


@triton.jit
def dot(left, right, IS_WIDE: tl.constexpr):
    """Multiply two tiles; the interpreter takes the bits of bf16 for integers."""
    if IS_WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def to_cache(x, CACHE):
    """Return keys or values as the cache stores them: in its dtype, or the bits of e4m3 (`decoding.cache`)."""
    if CACHE.dtype.element_ty == tl.uint8:
        x = x.to(tl.float32)
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # three digits of the fraction, rounded to nearest even; below 2^-6 they have one exponent, as the sum has
        number = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        kept = (tl.where(size < 0.015625, small, number) | tl.where(x < 0, 0x80, 0)).to(tl.uint8)
    else:
        kept = x.to(CACHE.dtype.element_ty)
    return kept


@triton.jit
def of_cache(stored, X):
    """Return stored keys or values as numbers: those of e4m3 in the dtype of X, exactly."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # in fp16 with exponents too small by 8
        number = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(X.dtype.element_ty)
    else:
        number = stored
    return number


@kernel
def norm_kernel(X, DELTA, WEIGHT, Y, eps, rows, DIM: tl.constexpr, SIZE: tl.constexpr, ADDS: tl.constexpr):
    """Compute one row of `norm`."""
    row = tl.program_id(0) * rows + tl.program_id(1)
    at = tl.arange(0, SIZE)
    inside = at < DIM
    x = tl.load(X + row * DIM + at, mask=inside, other=0.0)
    if ADDS:
        delta = tl.load(DELTA + row * DIM + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(X.dtype.element_ty)
        tl.store(X + row * DIM + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    y = (wide * scale).to(Y.dtype.element_ty).to(tl.float32)
    weight = tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * DIM + at, (y * weight).to(Y.dtype.element_ty), mask=inside)


@kernel
def rotary_kernel(
    QKV, ROPE, POSITIONS, SLOTS, CACHE,
    rows, lines, slots, position_line,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEADS_SIZE: tl.constexpr, WIDTH_SIZE: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Compute one row of `rotate_and_store`: a GROUP-th of its queries, or its keys or values."""
    line, node, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = line * rows + node
    head = tl.arange(0, HEADS_SIZE)[:, None]
    half: tl.constexpr = WIDTH_SIZE // 2
    pair = tl.arange(0, half)
    inside = (head < HEADS) & (pair[None] < WIDTH // 2)
    place = head * WIDTH + (2 if APART == 1 else 1) * pair[None]
    source = QKV + (row * (GROUP + 2) + kind) * HEADS * WIDTH
    even = tl.load(source + place, mask=inside, other=0.0)
    odd = tl.load(source + place + APART, mask=inside, other=0.0)
    if kind < GROUP + 1:
        factors = ROPE + tl.load(POSITIONS + line * position_line + node) * WIDTH + 2 * pair
        cos = tl.load(factors, mask=pair < WIDTH // 2, other=0.0)[None]
        sin = tl.load(factors + 1, mask=pair < WIDTH // 2, other=0.0)[None]
        first, second = even.to(tl.float32), odd.to(tl.float32)
        even = (first * cos - second * sin).to(QKV.dtype.element_ty)
        odd = (second * cos + first * sin).to(QKV.dtype.element_ty)
    if kind < GROUP:
        tl.store(source + place, even, mask=inside)
        tl.store(source + place + APART, odd, mask=inside)
    else:
        slot = tl.load(SLOTS + node)
        base = ((kind - GROUP) * lines + line).to(tl.int64) * HEADS * slots * WIDTH
        target = CACHE + base + (head * slots + slot) * WIDTH + (2 if APART == 1 else 1) * pair[None]
        tl.store(target, to_cache(even, CACHE), mask=inside)
        tl.store(target + APART, to_cache(odd, CACHE), mask=inside)


@kernel
def plan_kernel(
    POSITIONS, MASK, SLOTS, TABLE, PLACES, FULL,
    rows, live, guided, conditioning, prefix, mask_line, mask_row, position_line,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Compute one row of `BlockAttention.plan`."""
    image, row = tl.program_id(0), tl.program_id(1)
    line = image * guided
    committed = tl.load(POSITIONS + line * position_line) - conditioning
    full = committed // BLOCK
    if row == 0:
        tl.store(FULL + image, full.to(tl.int32))
    own = tl.load(POSITIONS + line * position_line + row) - conditioning
    tl.store(PLACES + image * rows + row, own.to(tl.int32))
    columns = tl.arange(0, SPAN)
    places = full * BLOCK + columns
    slot = tl.where(places < committed, places + prefix, -1)
    node = tl.arange(0, NODES)
    staged = tl.load(SLOTS + node, mask=node < live, other=0)
    score = tl.load(MASK + line * mask_line + row * mask_row + staged, mask=node < live, other=float("-inf"))
    place = tl.load(POSITIONS + line * position_line + node, mask=node < live, other=0) - conditioning
    seen = places[:, None] == tl.where(score == 0.0, place, -1)[None]
    found = tl.max(tl.where(seen, staged[None], -1), 1)
    slot = tl.where(found >= 0, found, slot)  # pyright: ignore[reportOperatorIssue]
    tl.store(TABLE + (image * rows + row) * SIZE + columns, slot.to(tl.int32), mask=columns < SIZE)


@kernel
def partials_kernel(
    QKV, CACHE, TABLE, PLACES, FULL, MAXIMA, SUMS, VALUES, LENGTHS,
    scale, rows, live, lines, slots, prefix, guided, blocks, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TILE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a partial result of a head: of a whole block for a tile of rows, or of a block of one row's tail.

    Blocks from `blocks` on are those of the prompt, whose keys and values end at slot `prefix`; without LENGTHS it has
    none.
    """
    line, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    KEPT: tl.constexpr = HEADS // GROUP
    if LENGTHS is None:
        parts = blocks
    tiles = (live + TILE - 1) // TILE
    job = tl.program_id(1)
    image = line // guided
    full = tl.load(FULL + image)
    is_tail = job >= parts * tiles
    first = tl.where(is_tail, (job - parts * tiles) // TAIL, (job % tiles) * TILE)
    part = (job - parts * tiles) % TAIL
    block = tl.where(is_tail, full + part, job // tiles)
    start = tl.load(PLACES + image * rows + first)
    # whole blocks are those before `full`; of the tail only blocks up to the row's own position
    has_keys = (is_tail & (block < blocks) & (block * BLOCK <= start)) | ((is_tail == 0) & (block < full))
    if LENGTHS is not None:
        length = tl.load(LENGTHS + line).to(tl.int32)
        is_prompt = (is_tail == 0) & (block >= blocks)
        has_keys = has_keys | (is_prompt & ((block - blocks) * BLOCK < length))
    if has_keys:
        lane = tl.arange(0, TILE)
        row = tl.where(is_tail, first + 0 * lane, first + lane)
        columns = tl.arange(0, BLOCK)
        dims = tl.arange(0, WIDTH_SIZE)
        table = TABLE + ((image * rows + first) * TAIL + part) * BLOCK + columns
        staged = tl.load(table, mask=columns >= tl.where(is_tail, 0, BLOCK), other=0)
        slot = tl.where(is_tail, staged, prefix + block * BLOCK + columns)
        if LENGTHS is not None:
            token = (block - blocks) * BLOCK + columns
            slot = tl.where(is_prompt, tl.where(token < length, prefix - length + token, -1), slot)
        seen = slot >= 0
        held = dims < WIDTH
        is_live = row < live
        q_at = QKV + ((line * rows + row) * (HEADS + 2 * KEPT) + head)[:, None] * WIDTH + dims[None]
        q = tl.load(q_at, mask=is_live[:, None] & held[None], other=0.0)
        base = (line * KEPT + head // GROUP).to(tl.int64) * slots * WIDTH
        kv_at = base + slot[:, None] * WIDTH + dims[None]
        kv_seen = seen[:, None] & held[None]
        k = of_cache(tl.load(CACHE + kv_at, mask=kv_seen, other=0), QKV)
        v = of_cache(tl.load(CACHE + lines.to(tl.int64) * KEPT * slots * WIDTH + kv_at, mask=kv_seen, other=0), QKV)
        scores = dot(q.to(k.dtype), tl.trans(k), IS_WIDE) * scale
        scores = tl.where(seen[None], scores, float("-inf"))
        largest = tl.max(scores, 1)
        weights = tl.exp(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
        total = tl.sum(weights, 1)
        values = dot(weights.to(v.dtype), v, IS_WIDE)
        kept = is_live & (lane < tl.where(is_tail, 1, TILE))
        at = ((line * HEADS + head) * rows + row) * parts + block
        tl.store(MAXIMA + at, largest, mask=kept)
        tl.store(SUMS + at, total, mask=kept)
        tl.store(VALUES + at[:, None] * WIDTH + dims[None], values, mask=kept[:, None] & held[None])


@kernel
def combine_kernel(
    MAXIMA, SUMS, VALUES, PLACES, MASK, CACHE, LENGTHS, OUT,
    rows, live, lines, slots, guided, blocks, parts, mask_line,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_SIZE: tl.constexpr, BLOCKS_SIZE: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the partial results of one row and head, and the prompt's: those of its blocks, or its one value."""
    if LENGTHS is None:
        parts = blocks
    pair, row = tl.program_id(0), tl.program_id(1)
    line, head = pair // HEADS, pair % HEADS
    last = tl.load(PLACES + (line // guided) * rows + row) // BLOCK
    number = tl.arange(0, BLOCKS_SIZE)
    dims = tl.arange(0, WIDTH_SIZE)
    held = dims < WIDTH
    seen = number <= last
    if LENGTHS is not None:
        length = tl.load(LENGTHS + line)
        seen = seen | ((number >= blocks) & ((number - blocks) * BLOCK < length))
    at = (pair * rows + row) * parts + number
    maxima = tl.load(MAXIMA + at, mask=seen, other=float("-inf"))
    sums = tl.load(SUMS + at, mask=seen, other=0.0)
    values = tl.load(VALUES + at[:, None] * WIDTH + dims[None], mask=seen[:, None] & held[None], other=0.0)
    if LENGTHS is not None:
        factors = tl.exp(maxima - tl.max(maxima, 0))
        total = tl.sum(factors * sums, 0)
        mixed = tl.sum(factors[:, None] * values, 0)
    else:
        # the prompt: slots 0 .. PREFIX - 1 with keys of zeros, one value, and the mask's numbers as scores
        score = tl.load(MASK + line * mask_line).to(tl.float32)
        shared = tl.full((), 1.0, tl.float32)
        if PREFIX == 2:
            shared += tl.exp(tl.load(MASK + line * mask_line + 1).to(tl.float32) - score)
        source = CACHE + (lines + line).to(tl.int64) * HEADS * slots * WIDTH + head * slots * WIDTH + dims
        prompt = of_cache(tl.load(source, mask=held, other=0), MAXIMA).to(tl.float32)
        largest = tl.maximum(tl.max(maxima, 0), score)
        factors = tl.exp(maxima - largest)
        own = tl.exp(score - largest) * shared
        total = own + tl.sum(factors * sums, 0)
        mixed = own * prompt + tl.sum(factors[:, None] * values, 0)
    out = OUT + ((line * rows + row) * HEADS + head) * WIDTH + dims
    shown = mixed / total  # pyright: ignore[reportOperatorIssue]
    tl.store(out, shown.to(OUT.dtype.element_ty), mask=held)


@kernel
def silu_mul_kernel(GATED, OUT, rows, HIDDEN: tl.constexpr, LANES: tl.constexpr):
    """Compute a part of one row of `silu_mul`."""
    row = tl.program_id(0) * rows + tl.program_id(1)
    at = tl.program_id(2) * LANES + tl.arange(0, LANES)
    inside = at < HIDDEN
    gate = tl.load(GATED + row * 2 * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATED + row * 2 * HIDDEN + HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * HIDDEN + at, (opened * up).to(OUT.dtype.element_ty), mask=inside)


@kernel
def linear8_kernel(
    X, WEIGHT, SCALE, OUT,
    count,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `linear8`."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = X + row[:, None] * INPUTS
    w_at = WEIGHT + column[:, None] * INPUTS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(x_at + at[None], mask=(row < count)[:, None] & (at < INPUTS)[None], other=0.0)
        w = tl.load(w_at + at[None], mask=(column < OUTPUTS)[:, None] & (at < INPUTS)[None], other=0)
        total += dot(x, tl.trans(w.to(tl.float32).to(x.dtype)), IS_WIDE)
    total = total * tl.load(SCALE + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None]
    out = OUT + row[:, None] * OUTPUTS + column[None]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=(row < count)[:, None] & (column < OUTPUTS)[None])


@triton.jit
def scores_of(
    LOGITS,
    VALUES, image, node, place, interval, values_stride, line_stride, node_stride,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr,
):  # fmt: skip
    """Return a node's guided scores over the temperature, no zero with a negative sign; -inf past the last token.

    VALUES are those of `Sampling.values`.
    """
    at = tl.arange(0, SIZE)
    return scores_at(
        *(LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride),
        *(at, at < TOKEN_COUNT, IS_GUIDED, IS_GREEDY),
    )


@triton.jit
def scores_at(
    LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride, at, inside,
    IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr,
):  # fmt: skip
    """Return the scores of the tokens `at` of one node, or of one of each of several; -inf where not `inside`."""
    line = image * 2 if IS_GUIDED else image
    source = LOGITS + line.to(tl.int64) * line_stride + node.to(tl.int64) * node_stride + at
    scores = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if IS_GUIDED:
        rest = tl.load(source + line_stride, mask=inside, other=0.0).to(tl.float32)
        guided = rest + (scores - rest) * tl.load(VALUES + image * values_stride)
        is_in_interval = (interval < 0) | (place <= interval + 1)
        scores = tl.where(is_in_interval, guided, scores)
    if not IS_GREEDY:
        scores = tl.div_rn(scores, tl.load(VALUES + image * values_stride + 1))
    return tl.where(inside, tl.where(scores == 0.0, 0.0, scores), float("-inf"))


@triton.jit
def ordered(scores):
    """Return integers in the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def least_of(scores, VALUES):
    """Return the k-th largest of `ordered` scores, bit by bit: the largest number that at least k of them reach.

    VALUES are those of an image.
    """
    top_k = tl.load(VALUES + 2).to(tl.int32)
    order = ordered(scores)
    reached = tl.sum((order >= 0).to(tl.int32), 0)
    bound = tl.where(reached >= top_k, 0, -2147483648).to(tl.int32)
    for step in range(0, 31):
        trial = bound + (1 << (30 - step))
        reached = tl.sum((order >= trial).to(tl.int32), 0)
        bound = tl.where(reached >= top_k, trial, bound)
    return bound


@kernel
def sample_kernel(
    LOGITS, VALUES, PLACES, NOISE, OUT, LOG_Q, CHANCES, GRID, TOTAL,
    spread, interval, nodes, positions, places_stride, place_stride, values_stride, line_stride, node_stride,
    grid_stride, width,
    TOKENS: tl.constexpr, IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr, HAS_NOISE: tl.constexpr,
    HAS_TOP_K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute the samples of one node, with LOG_Q its log-probabilities, with CHANCES those of the samples to match.

    With GRID the best token is written there at its place; with TOTAL the sum of the scores is added to the image's.
    """
    image, node = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, SIZE)
    inside = at < TOKENS
    place = tl.load(PLACES + image * places_stride + node * place_stride)
    scores = scores_of(
        *(LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride),
        *(TOKENS, SIZE, IS_GUIDED, IS_GREEDY),
    )
    if TOTAL is not None:
        tl.atomic_add(TOTAL + image, tl.sum(tl.where(inside, scores, 0.0), 0))
    if HAS_TOP_K:
        bound = least_of(scores, VALUES + image * values_stride)
        scores = tl.where(ordered(scores) >= bound, scores, float("-inf"))
    if LOG_Q is not None:
        largest = tl.max(scores, 0)
        scores = scores - largest - tl.log(tl.sum(tl.exp(scores - largest), 0))
        tl.store(LOG_Q + (image * nodes + node).to(tl.int64) * TOKENS + at, scores, mask=inside)
    if HAS_NOISE:
        row = tl.minimum(tl.maximum(place, 0), positions - 1)
        noise = NOISE + (image * positions + row).to(tl.int64) * TOKENS + at
        scores = scores + tl.load(noise, mask=inside, other=0.0)
    if CHANCES is not None:
        largest = tl.max(scores, 0)
        log_sum = tl.log(tl.sum(tl.exp((scores - largest) / spread), 0))
    scores = tl.where(inside & (scores == float("-inf")), -1e38, scores)  # so that the best are distinct
    for choice in range(0, width):
        best = tl.minimum(tl.argmax(scores, 0), TOKENS - 1)  # where scores are NaN it may be any
        at_choice = (image * nodes + node) * width + choice
        tl.store(OUT + at_choice, best.to(tl.int64))
        if CHANCES is not None:
            top = tl.max(scores, 0)
            chance = (top - largest) / spread - log_sum  # pyright: ignore
            tl.store(CHANCES + at_choice, tl.where(top > -1e38, chance, float("-inf")))  # pyright: ignore
        if GRID is not None:
            tl.store(GRID + image * grid_stride + place, best.to(tl.int64), mask=choice == 0)
        scores = tl.where(at == best, float("-inf"), scores)


def norm(
    x: Float[Tensor, "m c"],
    delta: Float[Tensor, "m c"] | None,
    weight: Float[Tensor, " c"],
    out: Float[Tensor, "m c"],
    *,
    eps: float,
    rows: int,
    live: int,
) -> None:
    """Add `delta` to `x` in place, and write RMSNorm of the sum to `out`, for the first `live` of each `rows` rows."""
    dim = x.shape[1]
    size = triton.next_power_of_2(dim)
    norm_kernel[(len(x) // rows, live)](
        *(x, x if delta is None else delta, weight, out, eps, rows),
        DIM=dim,
        SIZE=size,
        ADDS=delta is not None,
        num_warps=min(max(size // 256, 1), 8),
    )


def rotate_and_store(
    qkv: Float[Tensor, "m c3"],
    rope: Float[Tensor, "p half 2"],
    positions: Int[Tensor, "lines n"],
    slots: Int[Tensor, " n"],
    cache: Float[Tensor, "2 lines h s d"],
    *,
    rows: int,
    splits: bool = False,
) -> None:
    """Rotate the queries in place, and write rotated keys and values of the live rows to their slots of the cache.

    A row of `qkv` holds the queries of all heads, then keys and values of h heads each. Numbers that are rotated
    together are neighbours; with `splits`, half a head apart.
    """
    lines, heads, count, width = cache.shape[1:]
    group = qkv.shape[1] // (heads * width) - 2
    rotary_kernel[(lines, positions.shape[1], group + 2)](
        *(qkv, rope, positions, slots, cache, rows, lines, count, positions.stride(0)),
        HEADS=heads, GROUP=group, WIDTH=width, HEADS_SIZE=triton.next_power_of_2(heads), WIDTH_SIZE=head_size(width),
        APART=width // 2 if splits else 1, num_warps=WARPS,
    )  # fmt: skip


def head_size(width: int) -> int:
    """Return the padded width of a head: a power of two of at least 16."""
    return max(1 << (width - 1).bit_length(), 16)


class BlockAttention:
    """Position-ordered attention of a pass: where each row finds its keys, and the memory of the partial results.

    The pass has `rows` rows per line, of which `live` hold nodes. `heads` are those of queries; a head of keys and
    values is read by as many of them as there are more. `lengths` are the tokens of each line's prompt, whose keys and
    values end at slot `prefix` of the cache; None for LlamaGen's, which have one value. All blocks are added in an
    order that depends on their number, rounded up to a power of two.

    `places[i, r]` is the position of row r of image i. `full[i]` is the number of blocks whose positions are all
    committed. `table[i, r, c]` is the slot of position `BLOCK * full[i] + c`, -1 where row r sees no key there. It
    holds `tail` blocks. Rows that are not live hold numbers that nothing reads.
    """

    def __init__(
        self,
        cache: StaticCache,
        *,
        rows: int,
        live: int,
        heads: int,
        lengths: Int[Tensor, "lines 1"] | None = None,
        ahead: int = 0,
    ) -> None:
        assert lengths is not None or cache.prefix in (1, 2), f"the prompt has {cache.prefix} slots, expected 1 or 2"
        self.cache, self.rows, self.live, self.heads, self.lengths = cache, rows, live, heads, lengths
        self.width, self.blocks = cache.buffer.shape[4], -(-cache.tokens // BLOCK)
        self.parts = self.blocks + (0 if lengths is None else -(-cache.prefix // BLOCK))
        # the last node of a chain stands at most `rows - 1` positions after the first, one whose ancestors are of
        # earlier passes fewer than `ahead` after the committed tokens
        self.tail = -(-(max(rows, ahead) - 1) // BLOCK) + 1
        images, device = cache.images, cache.buffer.device
        self.table = torch.empty(images, rows, self.tail * BLOCK, dtype=torch.int32, device=device)
        self.places = torch.empty(images, rows, dtype=torch.int32, device=device)
        self.full = torch.empty(images, dtype=torch.int32, device=device)
        size = (images * cache.rows * heads, rows, self.parts)
        maxima, sums = torch.empty(2, *size, dtype=torch.float32, device=device).unbind()
        self.partial = maxima, sums, torch.empty(*size, self.width, dtype=torch.float32, device=device)

    def plan(
        self,
        positions: Int[Tensor, "lines n"],
        mask: Float[Tensor, "lines n s"],
        slots: Int[Tensor, " n"],
        *,
        conditioning: int,
    ) -> None:
        """Read which keys each node sees: all committed tokens, which are those before node 0, and its ancestors.

        Node j is an ancestor of node i, or i itself, if the mask is 0 at its slot. `mask[l, i, :prefix]` are the scores
        of the prompt. Rows of an image see the same.
        """
        assert mask.stride(2) == 1 and positions[0].is_contiguous() and slots.is_contiguous()
        size = self.table.shape[2]
        plan_kernel[(self.cache.images, self.live)](
            *(positions, mask, slots, self.table, self.places, self.full),
            *(self.rows, self.live, self.cache.rows, conditioning, self.cache.prefix),
            *(mask.stride(0), mask.stride(1), positions.stride(0)),
            BLOCK=BLOCK, SPAN=triton.next_power_of_2(size), SIZE=size, NODES=triton.next_power_of_2(self.rows),
            num_warps=WARPS,
        )  # fmt: skip

    def __call__(
        self,
        qkv: Float[Tensor, "m c3"],
        kept: Float[Tensor, "2 lines h s d"],
        mask: Float[Tensor, "lines n s"],
        out: Float[Tensor, "m c"],
    ) -> None:
        """Write the attention of the live rows to `out`; queries are the first columns of `qkv`, rotated.

        `kept` are the keys and values of a layer.
        """
        lines, heads, slots = kept.shape[1:4]
        prefix, guided, has_keys = self.cache.prefix, self.cache.rows, self.lengths is not None
        parts = self.parts if has_keys else None
        jobs = self.parts * -(-self.live // TILE) + self.live * self.tail
        size = head_size(self.width)
        partials_kernel[(lines * self.heads, jobs)](
            *(qkv, kept, self.table, self.places, self.full, *self.partial, self.lengths, self.width**-0.5),
            *(self.rows, self.live, lines, slots, prefix, guided, self.blocks, parts),
            HEADS=self.heads, GROUP=self.heads // heads, WIDTH=self.width, WIDTH_SIZE=size, BLOCK=BLOCK,
            TAIL=self.tail, TILE=TILE, IS_WIDE=is_interpreted(), num_warps=WARPS,
        )  # fmt: skip
        combine_kernel[(lines * self.heads, self.live)](
            *(*self.partial, self.places, mask, kept, self.lengths, out),
            *(self.rows, self.live, lines, slots, guided, self.blocks, parts, mask.stride(0)),
            HEADS=self.heads, WIDTH=self.width, WIDTH_SIZE=size, BLOCKS_SIZE=triton.next_power_of_2(self.parts),
            PREFIX=0 if has_keys else prefix, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def silu_mul(gated: Float[Tensor, "m h2"], out: Float[Tensor, "m h"], *, rows: int, live: int) -> None:
    """Write silu(gate) * up of the live rows to `out`; a row of `gated` is [gate | up]."""
    hidden = out.shape[1]
    silu_mul_kernel[(len(out) // rows, live, -(-hidden // LANES))](
        gated, out, rows, HIDDEN=hidden, LANES=LANES, num_warps=WARPS
    )


def linear8(
    x: Float[Tensor, "m k"], weight: Int[Tensor, "n k"], scale: Float[Tensor, " n"], out: Float[Tensor, "m n"]
) -> None:
    """Write x times the transpose of an 8-bit weight with one scale per output to `out`."""
    rows = min(max(triton.next_power_of_2(len(x)), TILE), 64)
    outputs, inputs = weight.shape
    columns = 32
    with np.errstate(over="ignore", invalid="ignore"):  # of rows without a node, in the interpreter
        linear8_kernel[(-(-outputs // columns), -(-len(x) // rows))](
            *(x, weight, scale, out, len(x)),
            OUTPUTS=outputs, INPUTS=inputs, ROWS=rows, COLUMNS=columns, DEPTH=128, IS_WIDE=is_interpreted(),
            num_warps=WARPS,
        )  # fmt: skip


@cache  # without a limit, since graphs read the memory
def numbers_on(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers on a device; made in the steps before a capture."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def values_of(sampling: Sampling, device: torch.device) -> tuple[Float[Tensor, "..."], int]:
    """Return the values of a sampling, of each image or of all, and the stride of an image."""
    if isinstance(sampling, HeldSampling):
        values = sampling.memory["values"]
        return values, values.stride(0)
    return numbers_on(sampling.settings, device, torch.float32), 0


def spaced(logits: Float[Tensor, "b r n v"]) -> tuple[Float[Tensor, "b r n v"], tuple[int, int]]:
    """Return logits whose tokens are neighbours and whose lines are equally far apart, and strides of line and node."""
    guided = logits.shape[1]
    if logits.stride(3) != 1 or (guided > 1 and logits.stride(0) != guided * logits.stride(1)):
        logits = logits.contiguous()
    return logits, (logits.stride(1 if guided > 1 else 0), logits.stride(2))


def sample(
    logits: Float[Tensor, "b r n v"],
    places: Int[Tensor, "b n"],
    noise: Float[Tensor, "b p v"] | None,
    sampling: Sampling,
    *,
    width: int = 1,
    log_q: Float[Tensor, "b n v"] | None = None,
    chances: Float[Tensor, "b n k"] | None = None,
    spread: float = 1.0,
    grid: Int[Tensor, "b t"] | None = None,
    total: Float[Tensor, " b"] | None = None,
) -> Int[Tensor, "b n k"]:
    """Return the `width` best tokens by log p + g, best first: guidance, temperature, top-k and arg-max of the sum.

    Writes the log-probabilities to `log_q`, which is contiguous, if it is given; not at temperature 0. With it
    log softmax((log p + g) / `spread`) of the best tokens is written to `chances`. With `grid` the best tokens are
    written there at `places`, with `total` the sums of guided scores are added to it.
    With one row of logits they count as guided. Of equal tokens the lowest comes first, and tokens equal to the k-th
    are kept with it. There is no top-p.
    """
    images, guided, nodes, tokens = logits.shape
    logits, strides = spaced(logits.float())
    values, apart = values_of(sampling, logits.device)
    out = torch.empty(images, nodes, width, dtype=torch.long, device=logits.device)
    size = triton.next_power_of_2(tokens)
    sample_kernel[(images, nodes)](
        *(logits, values, places, logits if noise is None else noise, out, log_q, chances, grid, total),
        *(spread, sampling.guidance_interval, nodes, 1 if noise is None else noise.shape[1]),
        *(*places.stride(), apart, *strides),
        *(0 if grid is None else grid.stride(0), width),
        TOKENS=tokens, IS_GUIDED=guided > 1, IS_GREEDY=sampling.is_greedy, HAS_NOISE=noise is not None,
        HAS_TOP_K=sampling.has_top_k(tokens), SIZE=size,
        num_warps=min(max(size // 512, 1), 16),
        **unfused(),
    )  # fmt: skip
    return out
