"""Windows tested by a kernel, one program per node: `CouplingVerifier` without a relaxation, for GPUs.

Each program repeats the tests of all nodes, which read one number of p and of q each, and so knows the first change.
Then it makes its own row and sample. A row is read in parts, twice if the node's token changes: once for the sum of
what it is sampled from, and once for the token at which the running sum exceeds u times that; once more for log r.
"""

# Functions below are typed by Triton's compiler, which the type checker does not know.
# pyright: reportOperatorIssue=false, reportUnboundVariable=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

# ruff: noqa: SIM102 (branches on constants are cut when a kernel is compiled, so they stand alone)
import torch
import triton
import triton.language as tl

from lantern.core.types import DraftTree, Verdict
from lantern.decoding.loop import LogitRows
from lantern.engines.cuda.kernels import kernel, unfused
from lantern.engines.cuda.walk import exponentials, log_p_at, summary
from lantern.verifiers.coupling import CouplingVerifier

CHUNK = 2048  # tokens of a part of a row


@kernel
def couple_kernel(
    LOGITS, VALUES, BOUNDS, NORMS, LOG_Q, TOKENS, PLACES, UNIFORMS, LOG_P, SAMPLED, PATH, LENGTH, NEXT,
    reuse, interval, nodes, positions, places_stride, values_stride, line_stride, node_stride,
    q_image_stride, q_node_stride,
    TOKEN_COUNT: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, NODES: tl.constexpr,
    IS_GUIDED: tl.constexpr, IS_GREEDY: tl.constexpr, HAS_TOP_K: tl.constexpr,
    IS_COUPLED: tl.constexpr, REUSES: tl.constexpr,
):  # fmt: skip
    """Test the window of an image and sample what follows one node."""
    image, node = tl.program_id(0), tl.program_id(1)
    first = tl.load(PLACES + image * places_stride)
    steps = UNIFORMS + (image * positions + tl.minimum(tl.maximum(first, 0), positions - 1)).to(tl.int64) * nodes * 2
    lines = LOG_Q + image.to(tl.int64) * q_image_stride
    # the tests
    number = tl.arange(0, NODES)
    is_tested = number < nodes - 1
    places = tl.load(PLACES + image * places_stride + number, mask=is_tested, other=0)
    drafts = tl.load(TOKENS + image * nodes + number + 1, mask=is_tested, other=0).to(tl.int32)
    own = log_p_at(
        *(LOGITS, VALUES, BOUNDS, NORMS, image, nodes, number, places),
        *(interval, values_stride, line_stride, node_stride),
        *(drafts, is_tested, IS_GUIDED, IS_GREEDY, HAS_TOP_K),
    )
    own_p = exponentials(own)
    own_q = exponentials(tl.load(lines + number * q_node_stride + drafts, mask=is_tested, other=float("-inf")))
    ahead = tl.minimum(tl.maximum(places - first, 0), nodes - 1)
    uniform = tl.load(steps + ahead * 2, mask=is_tested, other=0.0)
    is_kept = is_tested & (uniform * own_q.to(tl.float64) < own_p.to(tl.float64))
    length = tl.min(tl.where(is_kept, NODES, number), 0)
    if node == 0:
        tl.store(LENGTH + image, length.to(tl.int64))
        path = tl.where(number < length, number + 1, 0)
        tl.store(PATH + image * (nodes - 1) + number, path.to(tl.int64), mask=is_tested)
    # this node
    is_own = (number == node) & is_tested
    is_last = node == nodes - 1
    is_redrawn = (node > length) & (is_last == 0)
    stays = node < length
    is_fresh = is_last
    if IS_COUPLED:
        stays = tl.max((is_own & is_kept).to(tl.int32), 0) > 0
    else:
        is_fresh = is_last | is_redrawn
    if REUSES:
        stays = stays | (is_redrawn & (tl.max((is_own & (own_p > reuse * own_q)).to(tl.int32), 0) > 0))
    row = image * nodes + node
    place = tl.load(PLACES + image * places_stride + node)
    out, before = LOG_P + row.to(tl.int64) * TOKEN_COUNT, lines + node * q_node_stride
    p_sum, over_sum = tl.zeros((CHUNK,), tl.float64), tl.zeros((CHUNK,), tl.float64)
    rest = tl.zeros((CHUNK,), tl.float32)  # of q, of tokens that do not stay
    for start in range(0, SIZE, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < TOKEN_COUNT
        log_p = log_p_at(
            *(LOGITS, VALUES, BOUNDS, NORMS, image, nodes, node, place),
            *(interval, values_stride, line_stride, node_stride),
            *(at, inside, IS_GUIDED, IS_GREEDY, HAS_TOP_K),
        )
        tl.store(out + at, log_p, mask=inside)
        p = exponentials(log_p)
        q = exponentials(tl.load(before + at, mask=inside, other=float("-inf")))
        p_sum += p.to(tl.float64)
        over_sum += tl.maximum(p - q, 0.0).to(tl.float64)
        if REUSES:
            rest += tl.where(p > reuse * q, 0.0, q)
    token = tl.sum(tl.where(is_own, drafts, 0), 0)
    over_total = tl.sum(over_sum, 0)
    tl.debug_barrier()
    if stays == 0:
        is_fresh = is_fresh | (over_total <= 0.0)
        drawn = tl.minimum(tl.maximum(place - first, 0), nodes - 1)
        goal = tl.load(steps + drawn * 2 + 1) * tl.where(is_fresh, tl.sum(p_sum, 0), over_total)
        passed = over_total * 0.0
        token, last = token * 0, token * 0  # last: the last token with mass
        for start in range(0, SIZE, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = at < TOKEN_COUNT
            p = exponentials(tl.load(out + at, mask=inside, other=float("-inf")))
            q = exponentials(tl.load(before + at, mask=inside, other=float("-inf")))
            mass = tl.where(is_fresh, p, tl.maximum(p - q, 0.0))
            sums = passed + tl.cumsum(mass.to(tl.float64), 0)
            token += tl.sum(((sums <= goal) & inside).to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(mass > 0.0, at, 0), 0))
            passed = tl.max(sums, 0)
        token = tl.minimum(token, last)
    tl.store(SAMPLED + row, token.to(tl.int64))
    if node == length:
        tl.store(NEXT + image, token.to(tl.int64))
    if REUSES:
        if is_redrawn:
            share = tl.sum(rest, 0)
            tl.debug_barrier()
            for start in range(0, SIZE, CHUNK):
                at = start + tl.arange(0, CHUNK)
                inside = at < TOKEN_COUNT
                p = exponentials(tl.load(out + at, mask=inside, other=float("-inf")))
                q = exponentials(tl.load(before + at, mask=inside, other=float("-inf")))
                mass = tl.where(p > reuse * q, q, 0.0) + share * p
                log_r = tl.where(mass > 0.0, tl.log(tl.where(mass > 0.0, mass, 1.0)), float("-inf"))
                tl.store(out + at, log_r, mask=inside)


def couple(verifier: CouplingVerifier, tree: DraftTree, rows: LogitRows, *, chunk: int = CHUNK) -> Verdict:
    """Return the verdict of `verifier.verify` for a window with log q; `chunk` are the tokens of a part of a row."""
    assert tree.log_q is not None
    images, _, nodes, tokens = rows.logits.shape
    device, places = rows.logits.device, rows.places
    log_q = tree.log_q if tree.log_q.stride(2) == 1 else tree.log_q.contiguous()
    log_p = torch.empty(images, nodes, tokens, dtype=torch.float32, device=device)
    sampled = torch.empty(images, nodes, dtype=torch.long, device=device)
    path = torch.empty(images, nodes - 1, dtype=torch.long, device=device)
    length, chosen = torch.empty(2, images, dtype=torch.long, device=device).unbind()
    found = summary(rows)
    couple_kernel[(images, nodes)](
        *(*found.read, log_q, tree.tokens.contiguous(), places, rows.noise.step_table(2, nodes)),
        *(log_p, sampled, path, length, chosen, float(verifier.reuse), rows.sampling.guidance_interval),
        *(nodes, rows.noise.positions, places.stride(0), *found.strides, log_q.stride(0), log_q.stride(1)),
        CHUNK=min(chunk, found.how["SIZE"]), NODES=triton.next_power_of_2(max(nodes, 2)),
        IS_COUPLED=verifier.redraw == "coupled", REUSES=verifier.redraw == "reuse", num_warps=16,
        **found.how, **unfused(),
    )  # fmt: skip
    return Verdict(path, length, chosen, sampled, log_p)
