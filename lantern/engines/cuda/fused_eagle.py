"""EAGLE-1 modules whose passes run by the products of `fused`: nine launches for a module of one layer, head included.

A pass of the drafter follows committed tokens and earlier staged pairs. Ancestors are in the order of their depths, so
that the k-th of them stands k positions after the committed tokens, which is all that attention by position needs.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.config import one_line
from lantern.core.weights import WeightCache, left_out, on_device, original
from lantern.decoding.cache import StaticCache
from lantern.engines.cuda import fused, kernels
from lantern.engines.cuda.kernels import kernel
from lantern.engines.cuda.target import DTYPES, FEW, is_readable, parts_of
from lantern.engines.cuda.trial import TOLERANCE
from lantern.engines.pass_times import waves
from lantern.methods.method import ADD_ONS, DRAFTER
from lantern.models.llamagen.transformer import Transformer

if TYPE_CHECKING:
    from lantern.drafters.eagle.networks import Eagle
else:  # engines know drafters by name only
    Eagle = ADD_ONS[DRAFTER].module

LOG = logging.getLogger("lantern")


@kernel
def pairs_kernel(
    TOKENS, PLACES, EMBEDDINGS, FEATURES, BIAS, SCALES, GUIDANCE, KNOWN, ANCESTORS, PAIRS, X, POSITIONS, TABLE,
    ROW_PLACES, FULL,
    live, guided, conditioning, prefix, slots, count, feature_line, feature_row, place_line, place_row, mask_line,
    mask_row, scale_line, scale_row,
    DIM: tl.constexpr, DIM_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, SPAN_SIZE: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """Write the pair of one row, what its product is added to, its position, and where it finds its keys."""
    line, node = tl.program_id(0), tl.program_id(1)
    image, row = line // guided, line * live + node
    at = tl.arange(0, DIM_SIZE)
    inside = at < DIM
    token = tl.load(TOKENS + image * live + node)
    embedding = tl.load(EMBEDDINGS + token * DIM + at, mask=inside, other=0.0)
    feature = tl.load(FEATURES + line * feature_line + node * feature_row + at, mask=inside, other=0.0)
    tl.store(PAIRS + row * 2 * DIM + at, embedding, mask=inside)
    tl.store(PAIRS + row * 2 * DIM + DIM + at, feature, mask=inside)
    own = tl.zeros((DIM_SIZE,), tl.float32)
    if BIAS is not None:
        own += tl.load(BIAS + at, mask=inside, other=0.0).to(tl.float32)
    if SCALES is not None:
        scale = tl.log(tl.load(SCALES + image * scale_line + node * scale_row))
        own += scale * tl.load(GUIDANCE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(X + row * DIM + at, own.to(X.dtype.element_ty), mask=inside)
    place = tl.load(PLACES + image * place_line + node * place_row)
    tl.store(POSITIONS + row, place + conditioning)
    if line % guided == 0:
        known = tl.load(KNOWN + image)
        full = known // BLOCK
        if node == 0:
            tl.store(FULL + image, full.to(tl.int32))
        tl.store(ROW_PLACES + image * live + node, place.to(tl.int32))
        ahead = full * BLOCK + tl.arange(0, SPAN_SIZE) - known
        staged = tl.arange(0, NODES)
        mark = ANCESTORS + image * mask_line + node * mask_row + staged
        sees = tl.load(mark, mask=staged < count, other=0).to(tl.int32)
        is_here = (sees > 0)[None] & ((tl.cumsum(sees, 0) - 1)[None] == ahead[:, None])
        found = tl.max(tl.where(is_here, slots + staged[None], -1), 1)
        slot = tl.where(ahead < 0, known + ahead + prefix, found)
        column = tl.arange(0, SPAN_SIZE)
        tl.store(TABLE + (image * live + node) * SPAN + column, slot.to(tl.int32), mask=column < SPAN)


@cache  # without a limit, since graphs read the memory
def unnormed(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return weight and sums of squares of rows that are not normed (`fused.qkv` with an eps of almost 0)."""
    squares = torch.zeros(FEW, -(-dim // kernels.PART), dtype=torch.float32, device=device)
    squares[:, 0] = dim
    return torch.ones(dim, dtype=dtype, device=device), squares


class FusedEagle(Eagle):
    """An EAGLE-1 module with the layers of another, whose small passes are kernels; larger ones are torch's.

    Weights are read where they are, so that they may change.
    """

    def __init__(self, of: Eagle) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(of))

    def draft(
        self,
        features: Float[Tensor, "b r n c"],
        tokens: Int[Tensor, "b n"],
        places: Int[Tensor, "b n"],
        sees: Callable[[Tensor, Tensor], Tensor],
        *,
        known: Int[Tensor, " b"],
        ancestors: Bool[Tensor, "*b n m"],
        scales: Float[Tensor, "b n"] | None,
        cache: StaticCache,
        slots: Int[Tensor, " n"],
        depth: int = 0,
    ) -> Float[Tensor, "b r n c"]:
        """Return the next features, as `Eagle.draft`."""
        images, guided, live, dim = features.shape
        lines = images * guided
        if lines * live > FEW:
            how: dict[str, Any] = {"known": known, "ancestors": ancestors, "cache": cache, "slots": slots}
            return super().draft(features, tokens, places, sees, scales=scales, depth=depth, **how)
        rows: dict[str, Any] = {"rows": live}
        config, count, sizes = self.config, lines * live, rows | {"live": live, "heads": self.config.n_head}
        attention = kernels.BlockAttention(cache, **sizes, lengths=cache.first, ahead=cache.stage)
        x = torch.empty(count, dim, dtype=self.dtype, device=features.device)
        pairs, attended, qkv, hidden = (x.new_empty(count, width) for width in (2 * dim, dim, 3 * dim, config.ffn_dim))
        squares, positions = fused.squares_of(x), places.new_empty(lines, live)
        given = features.flatten(0, 1)
        if given.stride(2) != 1:
            given = given.contiguous()
        if scales is None or config.form != "guided":
            scale = (None, None, 0, 0)
        else:
            scale = (scales, self.guidance, *scales.stride())
        seen = ancestors if ancestors.stride(-1) == 1 else ancestors.contiguous()
        span = attention.table.shape[2]
        # pairs, positions and plan of the pass, and in `x` what the product of the pairs is added to
        pairs_kernel[(lines, live)](
            *(tokens.contiguous(), places, self.embed_tokens.weight, given, self.fc.bias),
            *scale[:2],
            *(known, seen.view(torch.uint8), pairs, x, positions, attention.table, attention.places, attention.full),
            *(live, cache.rows, config.cls_token_num, cache.prefix, cache.first_stage_slot, seen.shape[-1]),
            *(given.stride(0), given.stride(1), places.stride(0), places.stride(1)),
            *(seen.stride(0) if seen.ndim == 3 else 0, seen.stride(-2), *scale[2:]),
            DIM=dim, DIM_SIZE=triton.next_power_of_2(dim), BLOCK=kernels.BLOCK, SPAN=span,
            SPAN_SIZE=triton.next_power_of_2(span), NODES=max(triton.next_power_of_2(seen.shape[-1]), 2), num_warps=4,
        )  # fmt: skip
        fused.single(pairs, self.fc.weight, x, squares, live=live, **rows)
        for layer in self.layers:
            block, feed, kept = layer.attention, layer.feed_forward, cache.layer(layer.number)
            if isinstance(layer.attention_norm, nn.Identity):
                (norm, before), eps = unnormed(dim, self.dtype, x.device), 1e-12
            else:
                norm, before, eps = layer.attention_norm.weight, squares, layer.attention_norm.eps
            own = (x, block.wqkv.weight, norm, before, qkv, self.rotary.table, positions, slots, kept)
            fused.qkv(*own, eps=eps, **rows)
            attention(qkv, kept, x, attended)
            fused.single(attended, block.wo.weight, x, squares, live=live, **rows)
            gate, norm = feed.w13.weight, layer.ffn_norm
            fused.gate_up(x, gate, norm.weight, squares, hidden, eps=norm.eps, live=live, **rows)
            fused.single(hidden, feed.w2.weight, x, squares, live=live, **rows)
        return x.view(images, guided, live, dim)

    def logits(self, features: Float[Tensor, "b n c"], target: Any) -> Float[Tensor, "b n v"]:
        """Return the fp32 logits of the target's head."""
        (lines, live, dim), weight = features.shape, target.output.weight
        is_fit = isinstance(original(target), Transformer) and is_readable(weight) and lines * live <= FEW
        if not is_fit or not weight.dtype == features.dtype == self.dtype:
            return super().logits(features, target)
        made = features.new_empty(lines, live, len(weight), dtype=torch.float32)
        x, (numbers, scale) = features.reshape(lines * live, dim), parts_of(weight)
        fused.single(x, numbers, made.view(lines * live, -1), None, scale=scale, rows=live, live=live)
        return made


_FUSED: WeightCache[FusedEagle] = WeightCache(FusedEagle)
_FAULTS: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def fused_eagle(module: Any) -> Any:
    """Return an EAGLE-1 module with passes by kernels if they can run it on its device; others as they are."""
    if type(module) is not Eagle or module.dtype not in DTYPES or left_out(module):
        return module
    device = module.embed_tokens.weight.device
    if fused.spills(module.embed_tokens.weight):
        return module
    if device.type != "cuda":
        return _FUSED.get(module) if kernels.is_interpreted() else module
    made, found, key = _FUSED.get(module), _FAULTS.setdefault(module, {}), (module.dtype, device)
    if key not in found:
        found[key] = fault_of(made)
        if found[key]:
            LOG.warning("the drafter's passes run through torch: %s", found[key])
    return module if found[key] else made


@torch.no_grad()
def fault_of(made: FusedEagle) -> str | None:
    """Return why passes of a prepared module cannot be used here, from passes beside torch's; None if they can."""
    device = made.embed_tokens.weight.device
    try:
        with on_device(device):
            expected, own = (tried(made, run) for run in (Eagle.draft, FusedEagle.draft))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton, its compilers and drivers raise errors of any kind
        return f"a pass failed: {type(error).__name__}: {one_line(error)[:200]}"
    difference, most = float((own - expected).norm() / expected.norm()), TOLERANCE[made.dtype]
    return None if difference <= most else f"features differ by {difference:.3g} of their norm, over {most:g}"


def tried(module: Eagle, run: Callable[..., Tensor], pairs: int = 4) -> Tensor:
    """Return features of a pass over a chain after half of an image, and of one over two nodes below its end."""
    config, device = module.config, module.embed_tokens.weight.device
    guided, known = 1 if config.form == "guided" else 2, config.block_size // 2
    sizes = {"images": 1, "rows": guided, "prefix": config.cls_token_num, "tokens": config.block_size}
    cache = module.new_cache(None, **sizes, stage=pairs + 2, device=device)
    cache.buffer.copy_(waves(cache.buffer.numel(), device=device).view_as(cache.buffer))
    cache.first.fill_(config.cls_token_num)
    mask = cache.tree_mask(torch.ones(1, config.cls_token_num, dtype=torch.bool, device=device), pairs + 2)
    count, features, made = torch.full((1,), known, device=device), None, []
    chain = torch.ones(pairs, pairs, dtype=torch.bool, device=device).tril()
    fork = torch.cat([chain[-1:].expand(2, -1), torch.eye(2, dtype=torch.bool, device=device)], 1)
    for ancestors, first in ((chain, 0), (fork, pairs)):
        nodes = len(ancestors)
        if features is None:
            features = waves(guided * nodes * config.dim, device=device).to(module.dtype).view(1, guided, nodes, -1)
        places = (ancestors.sum(1) - 1 + known).clamp(max=config.block_size - 1)[None]
        out = run(
            *(module, features, (torch.arange(nodes, device=device) % config.vocab_size)[None], places),
            lambda _, seen: mask.update(count, seen),
            known=count,
            ancestors=ancestors,
            scales=torch.full((1, nodes), 3.0, dtype=torch.float32, device=device),
            cache=cache,
            slots=torch.arange(first, first + nodes, device=device) + cache.first_stage_slot,
            depth=first,
        )
        made.append(out.float())
        features = out[:, :, -1:].expand(-1, -1, 2, -1)
    return torch.cat(made, 2)
