"""Draft trees walked by one kernel, one program per image: `RejectionVerifier` and `GumbelVerifier` for GPUs.

Gumbel match looks up the deepest path of matching nodes at once. In multi-round rejection a program keeps three rows of
fp32 numbers in global memory, which stay in the caches of its processor: p twice (what a rejection leaves is written to
the other one) and q. Rows are not normalised after a test: `p_scale` and `q_scale` multiply what is read. Only rows of
visited nodes are written. Neighbours are read by index, and a rejection is one pass over the rows:

    left = max(p - q, 0) everywhere but at x and at the tokens whose mass moves, which are marked with -1
    S = sum of left; the marked tokens follow one by one: their old values (exact test) and their new ones (relaxed)
    sums E = S + old, L = S + new; TV(left, exact left) = (S |1/L - 1/E| + sum |new/L - old/E|) / 2

A kernel before it finds, for all nodes at once, the k-th largest score, the maximum and the sum of exponentials of each
row, which are the slow part of a row; the walk then reads three numbers per row. At temperature 0 it is the best token.

Values pass between the threads of a program through global memory, with a barrier between.
"""

# Functions below are typed by Triton's compiler, which the type checker does not know.
# pyright: reportOperatorIssue=false, reportUnboundVariable=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

# ruff: noqa: SIM102, SIM108 (branches on constants are cut when a kernel is compiled, so they stand alone)
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern.core.sampling import Noise, Purpose
from lantern.core.types import Cost, DraftTree, Rows, Verdict
from lantern.decoding.loop import LogitRows
from lantern.engines.cuda.kernels import (
    kernel,
    least_of,
    numbers_on,
    ordered,
    scores_at,
    scores_of,
    spaced,
    unfused,
    values_of,
)
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.distributions import Bounded, Mixture
from lantern.verifiers.relaxations.neighbours import ClaimingRule, Lantern, LanternPP
from lantern.verifiers.relaxations.rule import Ruling, UnderTest
from lantern.verifiers.relaxed import RelaxedVerifier

SMALLEST_LOG, SMALLEST = tl.constexpr(-87.0), tl.constexpr(1.7e-38)  # of lantern.core.sampling
TINY = tl.constexpr(1.1754943508222875e-38)  # a smaller sum counts as 0: its reciprocal may be infinite
MOST_TOKENS = 16384
RULES = (type(None), Lantern, LanternPP, Grouped)  # relaxations; a subclass may judge otherwise
MOVES = (Bounded, Mixture)  # relaxations of distributions
CHUNK = 2048  # tokens of a part of a pass: whole rows of 16,384 would spill registers
MOST_NODES = 128
END = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def exponentials(log_p):
    """Return exp(log p), with 0 for what is no normal number, as `probabilities`."""
    p = tl.exp(tl.maximum(log_p, SMALLEST_LOG))
    return tl.where(p > SMALLEST, p, 0.0)


@triton.jit
def log_p_at(
    LOGITS, VALUES, BOUNDS, NORMS, image, nodes, node, place, interval, values_stride, line_stride, node_stride, at,
    inside, IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr, HAS_TOP_K: tl.constexpr,
):  # fmt: skip
    """Return log p of the tokens `at` after one node, or of one after each of several; -inf where not `inside`.

    BOUNDS and NORMS are what `summary_kernel` found.
    """
    row = image * nodes + tl.minimum(node, nodes - 1)
    if IS_GREEDY:
        log_p = tl.where(inside & (at == tl.load(BOUNDS + row)), 0.0, float("-inf"))
    else:
        scores = scores_at(
            *(LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride),
            *(at, inside, IS_GUIDED, IS_GREEDY),
        )
        if HAS_TOP_K:
            scores = tl.where(ordered(scores) >= tl.load(BOUNDS + row), scores, float("-inf"))
        log_p = scores - tl.load(NORMS + row * 2) - tl.load(NORMS + row * 2 + 1)
    return log_p


@triton.jit
def group_of(
    P, Q, token, p_scale, q_scale, VECTORS, half, p_radius, d_radius,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the mass by which `Grouped` accepts a token, and the mean distance to what a rejection leaves.

    Up to `half` neighbours on each side in the order of p are found one by one, by keys of p and, at equal p, of token.
    """
    PART: tl.constexpr = CHUNK // 2  # larger parts would spill registers
    LINES: tl.constexpr = (CHUNK + VECTOR_SIZE - 1) // VECTOR_SIZE
    part, lane = tl.arange(0, PART), tl.arange(0, VECTOR_SIZE)
    own_raw = tl.load(P + token)
    own_p, own_q = own_raw * p_scale, tl.load(Q + token) * q_scale
    own_vector = tl.load(VECTORS + token * VECTOR + lane, mask=lane < VECTOR, other=0.0)
    own_key = (own_raw.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (SIZE - 1 - token)
    p_sum, q_sum, others = own_p, own_q, tl.full((), 0, tl.int32)
    for sign in range(-1, 2, 2):
        key = own_key * sign
        for _ in range(0, half):
            least = tl.full((PART,), END, tl.int64)
            for start in range(0, SIZE, PART):
                step = start + part
                raw = tl.load(P + step, mask=step < TOKEN_COUNT, other=0.0)
                keys = ((raw.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (SIZE - 1 - step)) * sign
                least = tl.minimum(least, tl.where((keys > key) & (step < TOKEN_COUNT), keys, END))
            key = tl.min(least, 0)
            near = SIZE - 1 - (key * sign & 0xFFFFFFFF)
            is_near = key < END
            p = tl.load(P + near, mask=is_near, other=0.0) * p_scale
            vector = tl.load(VECTORS + near * VECTOR + lane, mask=is_near & (lane < VECTOR), other=0.0)
            away = tl.sqrt(tl.sum((vector - own_vector) * (vector - own_vector), 0))
            is_in = is_near & (tl.abs(p - own_p) < p_radius) & (away < d_radius)
            p_sum += tl.where(is_in, p, 0.0)
            q_sum += tl.load(Q + near, mask=is_in, other=0.0) * q_scale
            others += is_in.to(tl.int32)
    mass = tl.where(others == 0, own_p, tl.div_rn(p_sum, tl.maximum(q_sum, TINY)) * own_q)
    left_sum, travelled = tl.zeros((LINES,), tl.float32), tl.zeros((LINES,), tl.float32)
    for start in range(0, SIZE, LINES):
        step = start + tl.arange(0, LINES)
        inside = step < TOKEN_COUNT
        p = tl.load(P + step, mask=inside, other=0.0) * p_scale
        left = tl.maximum(p - tl.load(Q + step, mask=inside, other=0.0) * q_scale, 0.0)
        vectors = VECTORS + step[:, None] * VECTOR + lane[None]
        apart = tl.load(vectors, mask=inside[:, None] & (lane < VECTOR)[None], other=0.0) - own_vector[None]
        left_sum += left
        travelled += left * tl.sqrt(tl.sum(apart * apart, 1))
    return mass, tl.div_rn(tl.sum(travelled, 0), tl.maximum(tl.sum(left_sum, 0), TINY))


@kernel
def summary_kernel(
    LOGITS, VALUES, PLACES, BOUNDS, NORMS,
    interval, nodes, places_stride, values_stride, line_stride, node_stride,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
):  # fmt: skip
    """Write the k-th largest score, the maximum and the logarithm of the sum of exponentials of one row."""
    image, node = tl.program_id(0), tl.program_id(1)
    place = tl.load(PLACES + image * places_stride + node)
    scores = scores_of(
        *(LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride),
        *(TOKEN_COUNT, SIZE, IS_GUIDED, IS_GREEDY),
    )
    row = image * nodes + node
    if IS_GREEDY:
        tl.store(BOUNDS + row, tl.argmax(scores, 0))
    elif HAS_TOP_K:
        bound = least_of(scores, VALUES + image * values_stride)
        scores = tl.where(ordered(scores) >= bound, scores, float("-inf"))
        tl.store(BOUNDS + row, bound)
    largest = tl.max(scores, 0)
    tl.store(NORMS + row * 2, largest)
    tl.store(NORMS + row * 2 + 1, tl.log(tl.sum(tl.exp(scores - largest), 0)))


@kernel
def walk_kernel(
    LOGITS, VALUES, BOUNDS, NORMS, LOG_Q, TOKENS, PARENTS, RANKS, WIDTHS, PLACES, UNIFORMS, NOISE, TABLE, FAR, VECTORS,
    SCRATCH, PATH, LENGTH, NEXT, IS_RELAXED, SPENT, MOVED,
    constant, factor, interval, nodes, positions, depth, lanes, near, columns,
    far_columns, p_radius, d_radius, places_stride, tree_stride, rank_stride, values_stride, line_stride, node_stride,
    q_image_stride, q_node_stride,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, NODES: tl.constexpr, NEAR: tl.constexpr,
    IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_NOISE: tl.constexpr,
    HAS_Q: tl.constexpr,  # else each token is a point draft
    REMOVES: tl.constexpr,  # samples without replacement
    RELAXES: tl.constexpr, IS_RELEASED: tl.constexpr, IS_COOL: tl.constexpr, SHARES: tl.constexpr,
    HAS_DISTANCES: tl.constexpr, VECTOR: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Walk the tree of one image."""
    image = tl.program_id(0)
    at = tl.arange(0, SIZE)
    numbers = tl.arange(0, NODES)
    is_node = (numbers < nodes) & (numbers > 0)
    parents = tl.load(PARENTS + image * tree_stride + numbers, mask=is_node, other=-1).to(tl.int32)
    ranks = tl.load(RANKS + image * rank_stride + numbers, mask=is_node, other=-1).to(tl.int32)
    columns_at = tl.arange(0, NEAR)
    P = SCRATCH + image.to(tl.int64) * (3 * SIZE)
    Q = P + 2 * SIZE
    node = tl.full((), 0, tl.int32)
    reached = tl.full((), 0, tl.int32)
    current = tl.full((), 0, tl.int32)
    p_scale = tl.full((), 1.0, tl.float32)
    is_open = tl.full((), 1, tl.int32)
    while is_open > 0:
        # the row of the node
        place = tl.load(PLACES + image * places_stride + node)
        log_p = log_p_at(
            *(LOGITS, VALUES, BOUNDS, NORMS, image, nodes, node, place),
            *(interval, values_stride, line_stride, node_stride),
            *(at, at < TOKEN_COUNT, IS_GUIDED, IS_GREEDY, HAS_TOP_K),
        )
        tl.store(P + at, exponentials(log_p))
        current = tl.full((), 0, tl.int32)
        p_scale = tl.full((), 1.0, tl.float32)
        q_scale = tl.full((), 1.0, tl.float32)
        # its children
        is_child = is_node & (parents == node)
        most = tl.max(tl.where(is_child, ranks, -1), 0) + 1
        if reached < depth:
            most = tl.minimum(most, tl.load(WIDTHS + reached))
        else:
            most = most * 0
        if HAS_Q:
            if most > 0:
                source = LOG_Q + image.to(tl.int64) * q_image_stride + node.to(tl.int64) * q_node_stride + at
                log_q = tl.load(source, mask=at < TOKEN_COUNT, other=float("-inf"))
                tl.store(Q + at, tl.where(at < TOKEN_COUNT, exponentials(log_q), 0.0))
        tl.debug_barrier()
        rank = tl.full((), 0, tl.int32)
        taken = tl.full((), 0, tl.int32)
        relaxed = tl.full((), 0.0, tl.float32)
        spent = tl.full((), 0.0, tl.float32)
        moved = tl.full((), 0.0, tl.float32)
        while (rank < most) & (taken == 0):
            child = tl.min(tl.where(is_child & (ranks == rank), numbers, NODES), 0)
            has_child = child < NODES
            # As in torch, the root stands for a rank without a child.
            child = tl.where(has_child, child, 0)
            token = tl.load(TOKENS + image * nodes + child).to(tl.int32)
            if HAS_Q:
                raw_q = tl.load(Q + token)
                own_q = raw_q * q_scale
            else:
                raw_q = p_scale * 0.0
                own_q = p_scale * 0.0 + 1.0
            is_tested = has_child & (own_q > 0.0)
            if is_tested:
                PC = P + current * SIZE
                raw_p = tl.load(PC + token)
                own_p = raw_p * p_scale
                tested_at = tl.minimum(tl.maximum(place, 0), positions - 1)
                uniform = tl.load(UNIFORMS + (image * positions + tested_at) * lanes + rank)
                threshold = uniform * own_q.to(tl.float64)
                old = tl.maximum(own_p - own_q, 0.0)
                new = old
                raised = own_p
                needs_pass = threshold >= own_p.to(tl.float64)
                if RELAXES:
                    # the claim: the longest run of neighbours within the budget
                    is_near = columns_at < near
                    is_around = columns_at < near + (1 if IS_RELEASED else 0)
                    around = tl.load(TABLE + token.to(tl.int64) * columns + columns_at, mask=is_around, other=0)
                    raw = tl.load(PC + around, mask=is_around, other=0.0)
                    p_near = raw * p_scale
                    budget = factor * own_p + constant
                    if SHARES:
                        budget = budget - spent
                    budget = tl.maximum(budget, 0.0)
                    sums = tl.cumsum(tl.where(is_near, p_near, 0.0).to(tl.float64), 0)
                    is_taken = is_near & (sums <= budget.to(tl.float64))
                    mass = tl.max(tl.where(is_taken, sums, 0.0), 0).to(tl.float32)
                    raised = own_p + mass
                    if HAS_Q:
                        q_near = tl.load(Q + around, mask=is_around, other=0.0) * q_scale
                    else:
                        q_near = p_near * 0.0
                    old_near = tl.maximum(p_near - q_near, 0.0)
                    if IS_RELEASED:
                        is_moved = is_around & (tl.max(is_taken.to(tl.int32), 0) > 0)
                        if HAS_Q:
                            new_near = p_near
                        else:
                            new_near = p_near * 0.0
                            new = new * 0.0
                    elif IS_COOL:  # what exact rejection leaves
                        is_moved = is_around & (near < 0)
                        new_near = p_near
                    else:
                        is_moved = is_taken
                        new_near = p_near * 0.0
                        new = tl.maximum(raised - own_q, 0.0)
                    least_q = tl.maximum(own_q, TINY)
                    chance = tl.minimum(tl.div_rn(raised, least_q), 1.0)
                    exact_chance = tl.minimum(tl.div_rn(own_p, least_q), 1.0)
                    gain = chance - exact_chance
                    weight = 1.0 - tl.maximum(chance, exact_chance)
                    spent += tl.abs(gain)
                    if HAS_DISTANCES:
                        far = tl.load(FAR + token.to(tl.int64) * far_columns + columns_at, mask=is_near, other=0.0)
                        travelled = tl.sum(tl.where(is_taken, p_near * far, 0.0), 0)
                        moved += tl.maximum(gain, 0.0) * tl.div_rn(travelled, tl.maximum(mass, TINY))
                    is_refused = threshold >= raised.to(tl.float64)
                    relaxed = tl.where(needs_pass & (is_refused == 0), 1.0, 0.0)
                    needs_pass = is_refused | ((weight > 0.0) & ((tl.max(is_moved.to(tl.int32), 0) > 0) | IS_RELEASED))
                    if needs_pass:
                        # p of marked tokens is not read again
                        tl.debug_barrier()
                        tl.store(PC + around, tl.where(is_moved, -1.0, raw), mask=is_moved)
                        tl.store(PC + token, -1.0)
                        tl.debug_barrier()
                if VECTORS is not None:
                    raised, reach = group_of(
                        *(PC, Q, token, p_scale, q_scale, VECTORS, near, p_radius, d_radius),
                        *(TOKEN_COUNT, SIZE, CHUNK, VECTOR, VECTOR_SIZE),
                    )
                    least_q = tl.maximum(own_q, TINY)
                    gain = tl.minimum(tl.div_rn(raised, least_q), 1.0) - tl.minimum(tl.div_rn(own_p, least_q), 1.0)
                    spent += tl.abs(gain)
                    moved += tl.maximum(gain, 0.0) * reach
                    is_refused = threshold >= raised.to(tl.float64)
                    relaxed = tl.where(needs_pass & (is_refused == 0), 1.0, 0.0)
                    needs_pass = is_refused
                if threshold < raised.to(tl.float64):
                    taken = child
                if needs_pass:
                    other = P + (1 - current) * SIZE
                    total = tl.zeros((CHUNK,), tl.float32)
                    q_total = tl.zeros((CHUNK,), tl.float32)
                    for start in range(0, SIZE, CHUNK):
                        step = start + tl.arange(0, CHUNK)
                        p = tl.load(PC + step)
                        if HAS_Q:
                            q = tl.load(Q + step)
                            left = tl.maximum(p * p_scale - q * q_scale, 0.0)
                            if REMOVES:
                                q_total += tl.where(step == token, 0.0, q)
                        else:
                            left = p * p_scale
                        left = tl.where((p < 0.0) | (step == token), 0.0, left)
                        tl.store(other + step, left)
                        total += left
                    common = tl.sum(total, 0)
                    sum_new = common + new
                    sum_old = common + old
                    if RELAXES:
                        sum_new += tl.sum(tl.where(is_moved, new_near, 0.0), 0)
                        sum_old += tl.sum(tl.where(is_moved, old_near, 0.0), 0)
                    tl.debug_barrier()
                    tl.store(other + token, new)
                    if RELAXES:
                        tl.store(other + around, new_near, mask=is_moved)
                        # what the marked tokens are worth after each test; where a sum is 0 the test leaves p
                        one_new = tl.div_rn(1.0, tl.where(sum_new > TINY, sum_new, 1.0))
                        one_old = tl.div_rn(1.0, tl.where(sum_old > TINY, sum_old, 1.0))
                        held = own_p + tl.sum(tl.where(is_moved, p_near, 0.0), 0)
                        unmarked = common * tl.abs(one_new - one_old)
                        rest = common * one_new
                        last, exact = new * one_new, old * one_old
                        last_near, exact_near = new_near * one_new, old_near * one_old
                        if sum_new <= TINY:
                            if IS_RELEASED:
                                count = tl.sum(is_moved.to(tl.float32), 0) + 1.0
                                last = last * 0.0 + 1.0 / TOKEN_COUNT
                                last_near = last_near * 0.0 + 1.0 / TOKEN_COUNT
                                unmarked = (TOKEN_COUNT - count) / TOKEN_COUNT
                                rest = unmarked
                            else:
                                last, last_near = own_p, p_near
                                unmarked = tl.maximum(1.0 - held, 0.0)
                        if sum_old <= TINY:
                            exact, exact_near = own_p, p_near
                            unmarked = tl.maximum(1.0 - held, 0.0)
                            if sum_new <= TINY:
                                unmarked = unmarked * 0.0
                        if HAS_Q:
                            apart = unmarked + tl.abs(last - exact)
                            apart += tl.sum(tl.where(is_moved, tl.abs(last_near - exact_near), 0.0), 0)
                            spent += weight * apart * 0.5
                        else:
                            apart = tl.abs(weight * rest - common) + tl.abs(chance + weight * last - own_p)
                            apart += tl.sum(tl.where(is_moved, tl.abs(weight * last_near - p_near), 0.0), 0)
                            spent += apart * 0.5 - tl.abs(gain)  # in place of the gain, added above
                    if sum_new > TINY:
                        current = 1 - current
                        p_scale = tl.div_rn(1.0, sum_new)
                    else:
                        if RELAXES:
                            tl.debug_barrier()
                            if IS_RELEASED:
                                tl.store(other + at, tl.where(at < TOKEN_COUNT, 1.0, 0.0))
                                current = 1 - current
                                p_scale = p_scale * 0.0 + 1.0 / TOKEN_COUNT
                            else:
                                tl.store(PC + around, raw, mask=is_moved)
                                tl.store(PC + token, raw_p)
                    if REMOVES:
                        q_sum = tl.sum(q_total, 0)
                        if q_sum > TINY:
                            tl.store(Q + token, 0.0)
                            q_scale = tl.div_rn(1.0, q_sum)
                    tl.debug_barrier()
            else:
                if REMOVES:
                    if raw_q > 0.0:
                        q = tl.where(at == token, 0.0, tl.load(Q + at))
                        q_sum = tl.sum(q, 0)
                        tl.debug_barrier()
                        if q_sum > TINY:
                            tl.store(Q + token, 0.0)
                            q_scale = tl.div_rn(1.0, q_sum)
                        tl.debug_barrier()
            rank += 1
        if reached < depth:
            tl.store(PATH + image * depth + reached, taken.to(tl.int64))
        if SPENT is not None:
            if reached < depth:
                tl.store(IS_RELAXED + image * depth + reached, relaxed)
            tl.store(SPENT + image * (depth + 1) + reached, spent)
            if MOVED is not None:
                tl.store(MOVED + image * (depth + 1) + reached, moved)
        if taken > 0:
            node = taken
            reached += 1
            tl.debug_barrier()
        else:
            is_open = is_open * 0
    for behind in range(reached + 1, depth + 1):
        if behind < depth:
            tl.store(PATH + image * depth + behind, tl.full((), 0, tl.int64))
        if SPENT is not None:
            if behind < depth:
                tl.store(IS_RELAXED + image * depth + behind, 0.0)
            tl.store(SPENT + image * (depth + 1) + behind, 0.0)
            if MOVED is not None:
                tl.store(MOVED + image * (depth + 1) + behind, 0.0)
    tl.store(LENGTH + image, reached.to(tl.int64))
    left = tl.load(P + current * SIZE + at) * p_scale
    final = tl.log(tl.maximum(left, TINY))
    if HAS_NOISE:
        place = tl.load(PLACES + image * places_stride + node)
        drawn_at = tl.minimum(tl.maximum(place, 0), positions - 1)
        noise = NOISE + (image * positions + drawn_at).to(tl.int64) * TOKEN_COUNT + at
        final += tl.load(noise, mask=at < TOKEN_COUNT, other=0.0)
    final = tl.where(at < TOKEN_COUNT, final, float("-inf"))
    tl.store(NEXT + image, tl.argmax(final, 0).to(tl.int64))


@kernel
def match_kernel(
    TOKENS, SAMPLED, PARENTS, DEPTHS, ANCESTORS, PATH, LENGTH, NEXT,
    nodes, depth, tree_stride, depth_stride, image_stride, row_stride,
    NODES: tl.constexpr,
):  # fmt: skip
    """Find the deepest path of one image whose nodes are what was sampled after their parents."""
    image = tl.program_id(0)
    number = tl.arange(0, NODES)
    inside = number < nodes
    parent = tl.load(PARENTS + image * tree_stride + number, mask=inside, other=0)
    level = tl.load(DEPTHS + image * depth_stride + number, mask=inside, other=0)
    token = tl.load(TOKENS + image * nodes + number, mask=inside, other=-1)
    sampled = tl.load(SAMPLED + image * nodes + parent, mask=inside, other=-2)
    is_match = (number == 0) | (token == sampled)
    above = ANCESTORS + image * image_stride + number[:, None] * row_stride + number[None]
    is_above = tl.load(above, mask=inside[:, None] & inside[None], other=0).to(tl.int32)
    is_broken = tl.max(tl.where(is_match[None], 0, is_above), 1) > 0
    reached = tl.where(inside & (is_broken == 0), level, 0)
    last, length = tl.argmax(reached, 0), tl.max(reached, 0)
    on_path = tl.load(ANCESTORS + image * image_stride + last * row_stride + number, mask=inside, other=0).to(tl.int32)
    tl.store(PATH + image * depth + number, tl.zeros_like(level), mask=(number >= length) & (number < depth))
    tl.store(PATH + image * depth + level - 1, number.to(tl.int64), mask=inside & (on_path > 0) & (level > 0))
    tl.store(LENGTH + image, length)
    tl.store(NEXT + image, tl.load(SAMPLED + image * nodes + last))


@kernel
def group_kernel(
    P, Q, TOKENS, VECTORS, MASS, REACH, near, p_radius, d_radius,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Write what `group_of` returns for one token."""
    row = tl.program_id(0)
    first, one = row.to(tl.int64) * TOKEN_COUNT, tl.full((), 1.0, tl.float32)
    mass, reach = group_of(
        *(P + first, Q + first, tl.load(TOKENS + row).to(tl.int32), one, one, VECTORS, near, p_radius, d_radius),
        *(TOKEN_COUNT, SIZE, CHUNK, VECTOR, VECTOR_SIZE),
    )
    tl.store(MASS + row, mass)
    tl.store(REACH + row, reach)


class KernelGrouped(Grouped):
    """As `Grouped`, by a kernel."""

    def judge(self, trial: UnderTest) -> Ruling:
        """Test x with the mass of its group."""
        tokens, vectors = trial.p.shape[1], self.codebook.float().contiguous()
        mass, reach = torch.empty(2, len(trial.tokens), dtype=torch.float32, device=trial.p.device).unbind()
        size = triton.next_power_of_2(tokens)
        group_kernel[(len(trial.tokens),)](
            *(trial.p.contiguous(), trial.q.contiguous(), trial.tokens.contiguous(), vectors, mass, reach),
            *(self.group // 2, float(self.p_radius), float(self.d_radius)),
            TOKEN_COUNT=tokens, SIZE=size, CHUNK=min(CHUNK, size), VECTOR=vectors.shape[1],
            VECTOR_SIZE=triton.next_power_of_2(vectors.shape[1]), num_warps=16, **unfused(),
        )  # fmt: skip
        return Ruling(mass, (trial.p - trial.q).clamp_(min=0.0), reach)


def takes(verifier: Any, tree: DraftTree, rows: Any) -> bool:
    """Return whether a kernel walks a tree: for Gumbel match, and for rejection, exact or by one of RULES.

    Rejection needs logits of at most MOST_TOKENS tokens, tables of noise, and log q of sampled drafts.
    So do rows of `Bounded` and `Mixture`, which `relax.KernelRows` makes for any verifier. In windows a kernel finds
    the groups of `Grouped`, and tests those without a relaxation.
    """
    if not tree.shape.widths or tree.shape.num_nodes > MOST_NODES:
        return False
    if type(verifier) is GumbelVerifier:
        return True
    if not isinstance(rows, LogitRows) or not isinstance(rows.noise, Noise):
        return False
    if type(verifier) is CouplingVerifier:
        is_tested = tree.log_q is not None and rows.logits.shape[-1] <= MOST_TOKENS
        return type(verifier.relaxation) is Grouped or (verifier.relaxation is None and is_tested)
    if rows.logits.shape[-1] > MOST_TOKENS:
        return False
    if type(verifier) is RelaxedVerifier:
        return type(verifier.relaxation) in MOVES and tree.log_q is not None and not rows.sampling.is_greedy
    if type(verifier) is not RejectionVerifier or type(verifier.relaxation) not in RULES:
        return False
    is_point = tree.mode == "point" and type(verifier.relaxation) is not Grouped
    return is_point or (tree.mode in ("sampled", "iid") and tree.log_q is not None)


def match(tree: DraftTree, rows: Rows) -> Verdict:
    """Return the verdict of `GumbelVerifier.verify` on rows of which all are sampled."""
    sampled, shape = rows.sample().contiguous(), tree.shape
    images, nodes = sampled.shape
    path = sampled.new_empty(images, shape.depth)
    length, chosen = sampled.new_empty(2, images).unbind()
    by_image = [part.stride(0) if part.ndim == 2 else 0 for part in (shape.parents, shape.depths)]
    ancestors = shape.ancestors
    match_kernel[(images,)](
        *(tree.tokens.contiguous(), sampled, shape.parents, shape.depths, ancestors, path, length, chosen),
        *(nodes, shape.depth, *by_image, ancestors.stride(0) if ancestors.ndim == 3 else 0, ancestors.stride(-2)),
        NODES=triton.next_power_of_2(max(nodes, 2)),
    )
    return Verdict(path, length, chosen, samples=sampled)


@dataclass(frozen=True)
class RowSummary:
    """What `summary_kernel` found of all rows, as a kernel's arguments: what it reads, strides, and constants."""

    read: tuple[Tensor, Tensor, Tensor, Tensor]  # logits, values, bounds, norms
    strides: tuple[int, int, int]
    how: dict[str, Any]


def summary(rows: LogitRows) -> RowSummary:
    """Summarise the rows of all nodes."""
    sampling, places, device = rows.sampling, rows.places, rows.logits.device
    images, guided, nodes, tokens = rows.logits.shape
    logits, strides = spaced(rows.logits)
    bounds = torch.empty(images, nodes, dtype=torch.int32, device=device)
    norms = torch.empty(images, nodes, 2, dtype=torch.float32, device=device)
    size = triton.next_power_of_2(tokens)
    how = {"TOKEN_COUNT": tokens, "SIZE": size, "IS_GUIDED": guided > 1, "IS_GREEDY": sampling.is_greedy}
    how |= {"HAS_TOP_K": sampling.has_top_k(tokens)}
    values, apart = values_of(sampling, device)
    summary_kernel[(images, nodes)](
        *(logits, values, places, bounds, norms, sampling.guidance_interval, nodes, places.stride(0), apart, *strides),
        num_warps=warps_of(size), **how, **unfused(),
    )  # fmt: skip
    return RowSummary((logits, values, bounds, norms), (apart, *strides), how)


def warps_of(size: int) -> int:
    """Return the warps of a program that holds a row of so many tokens."""
    return min(max(size // 512, 4), 16)


def walk(verifier: RejectionVerifier, tree: DraftTree, rows: LogitRows, *, chunk: int = CHUNK) -> Verdict:
    """Return the verdict of `verifier.verify`; see `takes` for its trees. Nothing waits for the device.

    `chunk` are the tokens of a part of a pass over a row.
    """
    noise, places = rows.noise, rows.places
    assert isinstance(noise, Noise)
    images, _, nodes, tokens = rows.logits.shape
    shape, depth, device, relaxation = tree.shape, len(tree.shape.widths), places.device, verifier.relaxation
    size = triton.next_power_of_2(tokens)
    path, length, chosen = (torch.empty(n, dtype=torch.long, device=device) for n in ((images, depth), images, images))
    scratch = torch.empty(images, 3, size, dtype=torch.float32, device=device)
    cost = distances = table = vectors = None
    near, residual, shared, constant, factor, radii = 0, "", False, 0.0, 0.0, (0.0, 0.0)
    if isinstance(relaxation, ClaimingRule):
        constant, factor = relaxation.constant, relaxation.factor
        table, distances, near, shared = relaxation.table, relaxation.distances, relaxation.k, relaxation.shared
        residual = relaxation.residual
    if isinstance(relaxation, Grouped):
        vectors, near = relaxation.codebook.float().contiguous(), relaxation.group // 2
        radii = (float(relaxation.p_radius), float(relaxation.d_radius))
    if relaxation is not None:
        spent = torch.empty(images, depth + 1, dtype=torch.float32, device=device)
        moved = None if distances is None and vectors is None else torch.empty_like(spent)
        cost = Cost(torch.empty(images, depth, dtype=torch.float32, device=device), spent, moved, relaxation.bound)
    found = summary(rows)
    log_q = None if tree.mode == "point" else tree.log_q
    if log_q is not None and log_q.stride(2) != 1:
        log_q = log_q.contiguous()
    lanes = max(shape.widths)
    gumbel = noise.gumbel_table(Purpose.RESIDUAL)
    walk_kernel[(images,)](
        *(*found.read, log_q, tree.tokens.contiguous(), shape.parents, shape.ranks),
        *(numbers_on(shape.widths, device, torch.int32), places, noise.uniform_table(lanes), gumbel),
        *(table, distances, vectors, scratch, path, length, chosen),
        *((None,) * 3 if cost is None else (cost.relaxed, cost.total_variation, cost.latent_distance)),
        *(constant, factor, rows.sampling.guidance_interval, nodes, noise.positions, depth, lanes, near),
        *(0 if of is None else of.stride(0) for of in (table, distances)),
        *(*radii, places.stride(0)),
        *(part.stride(0) if part.ndim == 2 else 0 for part in (shape.parents, shape.ranks)),
        *found.strides,
        *((0, 0) if log_q is None else (log_q.stride(0), log_q.stride(1))),
        CHUNK=min(chunk, size), NODES=triton.next_power_of_2(max(nodes, 2)),
        NEAR=triton.next_power_of_2(max(near + int(residual == "released"), 2)), HAS_NOISE=gumbel is not None,
        HAS_Q=log_q is not None, REMOVES=tree.mode == "sampled", RELAXES=table is not None,
        IS_RELEASED=residual == "released", IS_COOL=residual == "cool", SHARES=shared,
        HAS_DISTANCES=distances is not None, VECTOR=0 if vectors is None else vectors.shape[1],
        VECTOR_SIZE=1 if vectors is None else triton.next_power_of_2(vectors.shape[1]), num_stages=1,
        num_warps=warps_of(size), **found.how, **unfused(),
    )  # fmt: skip
    return Verdict(path, length, chosen, cost=cost)
