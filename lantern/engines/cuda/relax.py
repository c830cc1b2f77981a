"""Rows of `Bounded` and `Mixture` by one kernel, one program per node, with the bits of the torch form.

A program keeps three rows of fp64 numbers in global memory: what each token has left to give, what it lacks, and what
is requested of it. All are whole units, so that sums and atomic additions do not depend on an order.
"""

# Functions below are typed by Triton's compiler, which the type checker does not know.
# pyright: reportOperatorIssue=false, reportUnboundVariable=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

# ruff: noqa: SIM108 (branches on constants are cut when a kernel is compiled, so they stand alone)
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core import sampling as core
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.decoding.loop import LogitRows
from lantern.engines.cuda import kernels
from lantern.engines.cuda.kernels import kernel, least_of, ordered, scores_of, spaced, unfused
from lantern.engines.cuda.walk import CHUNK, TINY
from lantern.verifiers.relaxations.distributions import Bounded, Mixture
from lantern.verifiers.relaxations.rule import Relaxation
from lantern.verifiers.relaxed import RelaxedRows

UNITS, COARSE = tl.constexpr(core.UNITS), tl.constexpr(core.COARSE)
TILE = 2048  # neighbours of a part of a round
PLAIN = Sampling(guidance=1.0)


@triton.jit
def rounded_exp(x):
    """Return e^x as fp64 numbers that are rounded to fp32."""
    return tl.exp(x.to(tl.float64)).to(tl.float32).to(tl.float64)


@triton.jit
def masses_of(LOG_P, LOG_Q, step, cap, TOKEN_COUNT: tl.constexpr, GRAIN: tl.constexpr):
    """Return log p and p of tokens, and the whole units that each may gain, of GRAIN, and lose."""
    inside = step < TOKEN_COUNT
    log_p = tl.load(LOG_P + step, mask=inside, other=float("-inf"))
    p, log_q = rounded_exp(log_p), tl.load(LOG_Q + step, mask=inside, other=float("-inf"))
    own = tl.floor(p * UNITS)
    gap = tl.floor(rounded_exp(log_q) * UNITS) - own
    gain = tl.floor(tl.maximum(tl.minimum(gap, cap * own), 0.0) / GRAIN) * GRAIN
    return log_p, p, gain, tl.maximum(-gap, 0.0)


@kernel
def relax_kernel(
    LOGITS, VALUES, LOG_Q, TOKENS, PARENTS, PLACES, BOUNDS, TABLE, FAR, SCRATCH, TAKERS, LOG_P, LOG_R, SHARE, SPENT,
    MOVED, delta, interval, nodes, near, rounds, width, columns, far_columns, places_stride,
    tree_stride, values_stride, line_stride, node_stride, q_image_stride, q_node_stride,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, NODES: tl.constexpr, NEAR: tl.constexpr,
    ROWS: tl.constexpr, GRAIN: tl.constexpr, IS_GUIDED: tl.constexpr, HAS_TOP_K: tl.constexpr,
):  # fmt: skip
    """Write log p and log r after one node, the cost there, and the shares of its children's r that exceed p."""
    image, node = tl.program_id(0), tl.program_id(1)
    row = (image * nodes + node).to(tl.int64)
    at, part, numbers = tl.arange(0, SIZE), tl.arange(0, CHUNK), tl.arange(0, NODES)
    LOG_P, LOG_R = LOG_P + row * TOKEN_COUNT, LOG_R + row * TOKEN_COUNT
    place = tl.load(PLACES + image * places_stride + node)
    scores = scores_of(
        *(LOGITS, VALUES, image, node, place, interval, values_stride, line_stride, node_stride),
        *(TOKEN_COUNT, SIZE, IS_GUIDED, tl.constexpr(False)),
    )
    if HAS_TOP_K:
        bound = least_of(scores, VALUES + image * values_stride)
        scores = tl.where(ordered(scores) >= bound, scores, float("-inf"))
    tl.store(LOG_P + at, scores - tl.max(scores, 0), mask=at < TOKEN_COUNT)
    tl.debug_barrier()
    gains, losses = tl.zeros((CHUNK,), tl.float64), tl.zeros((CHUNK,), tl.float64)
    for start in range(0, SIZE, CHUNK):
        step = start + part
        shifted = tl.load(LOG_P + step, mask=step < TOKEN_COUNT, other=float("-inf"))
        gains += tl.floor(rounded_exp(shifted) * COARSE)
    log_sum = tl.log((tl.sum(gains, 0) / COARSE).to(tl.float32).to(tl.float64)).to(tl.float32)
    for start in range(0, SIZE, CHUNK):
        step = start + part
        log_p = tl.load(LOG_P + step, mask=step < TOKEN_COUNT, other=float("-inf")) - log_sum
        tl.store(LOG_P + step, log_p, mask=step < TOKEN_COUNT)
        tl.store(LOG_R + step, log_p, mask=step < TOKEN_COUNT)
    parents = tl.load(PARENTS + image * tree_stride + numbers, mask=numbers < nodes, other=-1)
    is_child = parents == node
    total, spent, moved = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float64)
    if tl.max((is_child & (numbers > 0)).to(tl.int32), 0) > 0:
        LOG_Q += image.to(tl.int64) * q_image_stride + node.to(tl.int64) * q_node_stride
        most, cap = tl.load(BOUNDS), tl.load(BOUNDS + 1)
        if TABLE is not None:
            LEFT = SCRATCH + row * (3 * SIZE)
            LACKS, DEMAND = LEFT + SIZE, LEFT + 2 * SIZE
        tl.debug_barrier()
        gains = gains * 0.0
        for start in range(0, SIZE, CHUNK):
            _, _, gain, loss = masses_of(LOG_P, LOG_Q, start + part, cap, TOKEN_COUNT, GRAIN)
            gains += gain
            losses += loss
            if TABLE is not None:
                tl.store(LEFT + start + part, loss)
                tl.store(LACKS + start + part, gain)
                tl.store(DEMAND + start + part, part * 0.0)
        if TABLE is not None:
            tl.debug_barrier()
            TAKERS += row * width
            # the `width` largest of distinct keys, which are in the order of deficits and then of tokens, last first
            keys = tl.load(LACKS + at) * (TOKEN_COUNT / GRAIN) + (TOKEN_COUNT - 1 - at)
            least, half, reached = total, total + 2.0**51, tl.full((), TOKEN_COUNT, tl.int32)
            while (half >= 1.0) & (reached > width):
                found = tl.sum(((keys >= least + half) & (at < TOKEN_COUNT)).to(tl.int32), 0)
                if found >= width:
                    least += half
                    reached = found
                half *= 0.5
            count = tl.full((), 0, tl.int32)
            for start in range(0, SIZE, CHUNK):
                step = start + part
                lacks = tl.load(LACKS + step)
                key = lacks * (TOKEN_COUNT / GRAIN) + (TOKEN_COUNT - 1 - step)
                is_taker = (lacks > 0.0) & (key >= least)
                tl.store(TAKERS + count + tl.cumsum(is_taker.to(tl.int32), 0) - 1, step, mask=is_taker)
                count += tl.sum(is_taker.to(tl.int32), 0)
            nearest = tl.arange(0, NEAR)[None]
            for _ in range(0, rounds):
                for is_granted in range(0, 2):  # requests, then grants
                    tl.debug_barrier()
                    for start in range(0, count, ROWS):
                        each = start + tl.arange(0, ROWS)
                        taker = tl.load(TAKERS + each, mask=each < count, other=0)
                        inside = (each < count)[:, None] & (nearest < near)
                        giver = tl.load(TABLE + taker.to(tl.int64)[:, None] * columns + nearest, mask=inside, other=0)
                        left = tl.load(LEFT + giver, mask=inside, other=0.0)
                        lacks = tl.load(LACKS + taker, mask=each < count, other=0.0)
                        share = tl.floor(tl.minimum(lacks / tl.maximum(tl.sum(left, 1), 1.0), 1.0) * COARSE)
                        if is_granted == 0:
                            asked = tl.broadcast_to(share[:, None], (ROWS, NEAR))
                            tl.atomic_add(DEMAND + giver, asked, mask=inside, sem="relaxed")
                        else:
                            share = share / COARSE
                            demand = tl.load(DEMAND + giver, mask=inside, other=0.0) / COARSE
                            offers = tl.floor(left / tl.maximum(demand, 1.0))
                            granted = tl.minimum(tl.floor(tl.sum(offers, 1) * share), lacks)
                            tl.store(LACKS + taker, lacks - granted, mask=each < count)
                            total += tl.sum(granted, 0)
                            if FAR is not None:
                                far = FAR + taker.to(tl.int64)[:, None] * far_columns + nearest
                                away = tl.load(far, mask=inside, other=0.0).to(tl.float64)
                                travelled = tl.sum(tl.floor(offers * away * (COARSE / UNITS)), 1)
                                moved += tl.sum(tl.floor(travelled * share), 0)
                tl.debug_barrier()
                for start in range(0, SIZE, CHUNK):
                    kept = 1.0 - tl.load(DEMAND + start + part) / COARSE
                    left = tl.load(LEFT + start + part)
                    tl.store(LEFT + start + part, tl.floor(left * tl.maximum(kept, 0.0)))
                    tl.store(DEMAND + start + part, part * 0.0)
            tl.debug_barrier()
        else:
            total = tl.sum(gains, 0)
        scale = tl.minimum(most / tl.maximum(total, 1.0), 1.0)
        if TABLE is not None:
            cut = scale
        else:
            cut = tl.minimum(total * scale / tl.maximum(tl.sum(losses, 0), 1.0), 1.0)
        for start in range(0, SIZE, CHUNK):
            step = start + part
            log_p, p, gain, loss = masses_of(LOG_P, LOG_Q, step, cap, TOKEN_COUNT, GRAIN)
            if TABLE is not None:
                gain -= tl.load(LACKS + step)
                loss -= tl.load(LEFT + step)
            change = tl.floor(gain * scale) - tl.floor(loss * cut)
            r = tl.maximum((p + change / UNITS).to(tl.float32), TINY)
            log_r = tl.where(change == 0.0, log_p, tl.log(r.to(tl.float64)).to(tl.float32))
            tl.store(LOG_R + step, log_r, mask=step < TOKEN_COUNT)
        spent = tl.minimum((tl.floor(total * scale) / UNITS).to(tl.float32), delta)
        moved = moved * scale / COARSE
        tl.debug_barrier()
        token = tl.load(TOKENS + image * nodes + numbers, mask=is_child, other=0)
        before, after = tl.maximum(tl.load(LOG_P + token), -1e38), tl.maximum(tl.load(LOG_R + token), -1e38)
        ratio = tl.minimum(before - after, 0.0).to(tl.float64)
        tl.store(SHARE + image * nodes + numbers, 1.0 - tl.exp(ratio), mask=is_child)
    tl.store(SPENT + row, spent)
    if FAR is not None:
        tl.store(MOVED + row, moved)


class KernelRows(RelaxedRows):
    """Rows of r after all nodes by one kernel; `lantern.engines.cuda.walk.takes` says of which trees."""

    def __init__(self, relaxation: Relaxation, tree: DraftTree, rows: LogitRows, *, chunk: int = CHUNK) -> None:
        self.places, self.may_stop, self._noise = rows.places, False, rows.noise
        sampling, log_q, parents = rows.sampling, tree.log_q, tree.shape.parents
        assert log_q is not None and isinstance(relaxation, Bounded | Mixture)
        (logits, strides), (values, apart) = spaced(rows.logits), kernels.values_of(sampling, rows.logits.device)
        images, guided, nodes, tokens = logits.shape
        log_q = log_q if log_q.stride(2) == 1 else log_q.contiguous()
        size, device = triton.next_power_of_2(tokens), logits.device
        table = distances = scratch = takers = None
        near = rounds = width = 0
        if isinstance(relaxation, Bounded):
            table, distances, near, rounds = relaxation.table, relaxation.distances, relaxation.k, relaxation.rounds
            width = min(relaxation.width, tokens)
            scratch = torch.empty(images, nodes, 3, size, dtype=torch.float64, device=device)
            takers = torch.empty(images, nodes, width, dtype=torch.int32, device=device)
        self._before, self._every = torch.empty(2, images, nodes, tokens, dtype=torch.float32, device=device).unbind()
        self._share, self._spent = torch.empty(2, images, nodes, dtype=torch.float32, device=device).unbind()
        self._distance = None if distances is None else torch.empty_like(self._spent)
        padded = triton.next_power_of_2(max(near, 2))
        relax_kernel[(images, nodes)](
            *(logits, values, log_q, tree.tokens.contiguous(), parents, self.places),
            kernels.numbers_on((relaxation.delta * core.UNITS, relaxation.cap - 1), device, torch.float64),
            *(table, distances, scratch, takers, self._before, self._every, self._share, self._spent, self._distance),
            *(float(relaxation.delta), sampling.guidance_interval, nodes, near, rounds, width),
            *(0 if of is None else of.stride(0) for of in (table, distances)),
            *(self.places.stride(0), parents.stride(0) if parents.ndim == 2 else 0),
            *(apart, *strides, log_q.stride(0), log_q.stride(1)),
            TOKEN_COUNT=tokens, SIZE=size, CHUNK=min(chunk, size), NODES=triton.next_power_of_2(max(nodes, 2)),
            NEAR=padded, ROWS=max(TILE // padded, 1), GRAIN=core.UNITS / core.COARSE if table is not None else 1.0,
            IS_GUIDED=guided > 1, HAS_TOP_K=sampling.has_top_k(tokens),
            num_warps=16, num_stages=1, **unfused(),
        )  # fmt: skip

    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return argmax(log r + g) after these nodes (None: all)."""
        if nodes is not None:
            return super().sample(nodes)
        return kernels.sample(self._every[:, None], self.places, self._noise.gumbel_table(), PLAIN)[..., 0]

    def before(self) -> Float[Tensor, "b n v"]:
        """Return log p after all nodes."""
        return self._before
