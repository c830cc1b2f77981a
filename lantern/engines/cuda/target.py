"""Targets whose passes over tokens are Triton kernels and matrix products of constant size.

In bf16 a matrix product may sum in another order for another number of rows. Every pass of a batch therefore has the
same number of rows, plain decoding included, and attention is ordered by position (`kernels`). The bits of a token's
logits are then the same in every tree and window of at most that many nodes, so exact methods give plain decoding's
tokens. Small passes of LlamaGen's run by the products of `fused`: six launches a layer instead of ten.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.sampling import Purpose, Sampling
from lantern.core.types import Condition, Prompt, Ranker, Sampler, Scores, Verdict
from lantern.core.weights import Int8Weight, PreparedTarget, WeightCache, is_quantized, on_device, read_in_passes
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import LogitRows
from lantern.engines.cuda import constant_rows, couple, fused, kernels, relax, rows_of, walk
from lantern.engines.cuda.kernels import BlockAttention
from lantern.engines.pass_times import waves
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxed import RelaxedVerifier

LOG = logging.getLogger("lantern")
FEW = 128  # rows of a batch up to which one read of the weights per 64 rows is fewer bytes than its activations
PROMPT_ROWS = 512  # rows of a pass over prompts
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Tap = Callable[[int, Tensor], None]


def refusal(target: Any) -> str | None:
    """Return why the kernels cannot run a target with LlamaGen's layers, or None if they can."""
    if not isinstance(target, Transformer):
        return f"the GPU kernels run LlamaGen transformers, this is a {type(target).__name__}"
    if (reason := refuses_dtype(target)) is not None:
        return reason
    weights = [module.weight for module in target.modules() if isinstance(module, torch.nn.Linear)]
    if not all(is_readable(weight) for weight in weights):
        return "the GPU kernels read weights in full or in int8, these are quantized otherwise"
    return None


def refuses_dtype(target: Any) -> str | None:
    """Return why the kernels cannot compute in a target's dtype, or None if they can."""
    dtype = target.tok_embeddings.weight.dtype
    return None if dtype in DTYPES else f"the GPU kernels compute in fp32, bf16 or fp16, the model is in {dtype}"


def is_readable(weight: Tensor) -> bool:
    """Return whether the kernels read a weight: in full or int8."""
    return isinstance(weight, Int8Weight) or not is_quantized(weight)


def parts_of(weight: Tensor) -> tuple[Tensor, Float[Tensor, " n"] | None]:
    """Return a weight's numbers and its scales, None if it is full."""
    return (weight.qdata, weight.scale.flatten()) if isinstance(weight, Int8Weight) else (weight.data, None)


class Linear:
    """Matrix products of one input, side by side, whose weights are full (torch.mm) or int8 (`kernels.linear8`)."""

    def __init__(self, *weights: Any) -> None:
        self.widths = [len(weight) for weight in weights]
        self.parts = [parts_of(weight) for weight in weights]

    def __call__(self, x: Float[Tensor, "m k"], out: Float[Tensor, "m n"]) -> None:
        """Write x times the transpose of each weight to its columns of `out`."""
        for (weight, scale), part in zip(self.parts, out.split(self.widths, 1), strict=True):
            if scale is None:
                torch.mm(x, weight.T, out=part)
            else:
                kernels.linear8(x, weight, scale, part)


class LayerWeights:
    """The weights of a layer of LlamaGen; query, key and value, and gate and up, are one matrix each."""

    def __init__(self, block: Any) -> None:
        attention, feed = block.attention, block.feed_forward
        self.attention_norm, self.ffn_norm = block.attention_norm.weight.data, block.ffn_norm.weight.data
        self.qkv, self.out = Linear(attention.wqkv.weight), Linear(attention.wo.weight)
        self.gate_up, self.down = Linear(feed.w13.weight), Linear(feed.w2.weight)


class KernelPass:
    """A target's weights, and the pass over them."""

    has_prompt_keys = False  # prompts have one value, LlamaGen's
    splits = False  # numbers that are rotated together are neighbours
    fuses = False  # batches of at most FEW rows run by the products of `fused`

    def __init__(self, target: Transformer) -> None:
        self.config, self.dtype = target.config, target.tok_embeddings.weight.dtype
        self.eps, self.heads = self.config.norm_eps, self.config.n_head
        self.layers = [LayerWeights(block) for block in target.layers]
        self.norm, self.head = target.norm.weight.data, Linear(target.output.weight)
        self.rope = target.rotary.table.contiguous()
        self.trials: dict[int, bool] = {}  # of `keeps_rows`, by number of rows

    def logits(self, features: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """Apply the head to all rows of a pass."""
        made = features.new_empty(len(features), self.config.vocab_size)
        self.head(features, made)
        return made

    @torch.no_grad()
    def keeps_rows(self, rows: int) -> bool:
        """Return whether a row of a pass of so many rows has the same bits wherever it stands, by its products.

        Those of `fused` keep them. Another product of constant size sums in one order only if its kernel divides all
        rows in the same way: each is tried once for each size, with one input in all rows and the target's own weights.
        """
        if self.fuses and rows <= FEW:
            return True
        if rows not in self.trials:
            layer, device = self.layers[0], self.norm.device

            def inputs(width: int) -> Float[Tensor, "m k"]:
                return waves(width, device=device).to(self.dtype).expand(rows, -1).contiguous()

            with on_device(device):
                made = [self.logits(inputs(self.config.dim))]
                for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                    x = inputs(linear.parts[0][0].shape[1])
                    made.append(x.new_empty(rows, sum(linear.widths)))
                    linear(x, made[-1])
            self.trials[rows] = all(torch.equal(out, out[:1].expand_as(out)) for out in made)
        return self.trials[rows]

    def __call__(
        self,
        inputs: Float[Tensor, "lines n c"],
        positions: Int[Tensor, "lines n"],
        mask: Float[Tensor, "lines n s"],
        *,
        cache: StaticCache,
        slots: Int[Tensor, "lines n"],
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score inputs, as `Transformer.forward`: node 0 follows the committed tokens, others their ancestors."""
        lines, live = inputs.shape[:2]
        lengths = cache.first if self.has_prompt_keys else None
        attention = BlockAttention(cache, rows=rows_of(lines, live), live=live, heads=self.heads, lengths=lengths)
        attention.plan(positions, mask, slots[0], conditioning=self.config.cls_token_num)
        # which of the two depends on the batch and not on the number of nodes, so that bits do not either
        run = self._fused if self.fuses and lines * constant_rows(lines) <= FEW else self._unfused
        entered = dict[int, Tensor]()

        def tap(number: int, x: Float[Tensor, "m c"]) -> None:
            """Keep the input of a layer if it is tapped."""
            if number in taps:
                entered[number] = self._live(x, attention).clone()

        features, logits = run(tap, attention, inputs, positions, mask, slots[0])
        tapped = torch.cat([entered[layer] for layer in taps], -1) if taps else None
        return Scores(logits, self._live(features, attention), tapped)

    def _unfused(
        self, tap: Tap, attention: BlockAttention, inputs: Tensor, positions: Tensor, mask: Tensor, slots: Tensor
    ) -> tuple[Float[Tensor, "m c"], Float[Tensor, "lines n v"]]:
        """Return features of all rows and logits of nodes; `tap` is called with each layer's number and input."""
        (lines, live), rows, cache = inputs.shape[:2], attention.rows, attention.cache
        how: dict[str, int] = {"rows": rows, "live": live}
        rope_positions = positions if attention.lengths is None else positions + attention.lengths
        x, attended, qkv, hidden = self._memory(lines * rows)
        normed, change, gated = torch.empty_like(x), torch.empty_like(x), hidden.new_empty(len(x), 2 * hidden.shape[1])
        x.view(lines, rows, -1)[:, :live].copy_(inputs)
        delta = None  # nothing is added to the input of the first layer
        for number, layer in enumerate(self.layers):
            kernels.norm(x, delta, layer.attention_norm, normed, eps=self.eps, **how)
            tap(number, x)
            layer.qkv(normed, qkv)
            kept = cache.layer(number)
            kernels.rotate_and_store(qkv, self.rope, rope_positions, slots, kept, rows=rows, splits=self.splits)
            attention(qkv, kept, mask, attended)
            delta = change
            layer.out(attended, delta)
            kernels.norm(x, delta, layer.ffn_norm, normed, eps=self.eps, **how)
            layer.gate_up(normed, gated)
            kernels.silu_mul(gated, hidden, **how)
            layer.down(hidden, delta)
        features = torch.empty_like(x)
        kernels.norm(x, delta, self.norm, features, eps=self.eps, **how)
        return features, self._live(self.logits(features), attention).float()

    def _fused(
        self, tap: Tap, attention: BlockAttention, inputs: Tensor, positions: Tensor, mask: Tensor, slots: Tensor
    ) -> tuple[Float[Tensor, "m c"], Float[Tensor, "lines n v"]]:
        """Return what `_unfused` does, for LlamaGen's layers."""
        (lines, live), how = inputs.shape[:2], {"rows": attention.rows}
        x, attended, qkv, hidden = self._memory(lines * attention.rows)
        squares = fused.squares_of(x)
        fused.enter(inputs, x, squares, **how)
        for number, layer in enumerate(self.layers):
            tap(number, x)
            kept, eps = attention.cache.layer(number), self.eps
            (wqkv, qkv_scale), (out, out_scale) = layer.qkv.parts[0], layer.out.parts[0]
            (w13, gate_scale), (down, down_scale) = layer.gate_up.parts[0], layer.down.parts[0]
            given = (x, wqkv, layer.attention_norm, squares, qkv, self.rope, positions, slots, kept)
            fused.qkv(*given, scale=qkv_scale, eps=eps, **how)
            attention(qkv, kept, mask, attended)
            fused.single(attended, out, x, squares, scale=out_scale, live=live, **how)
            fused.gate_up(x, w13, layer.ffn_norm, squares, hidden, scale=gate_scale, eps=eps, live=live, **how)
            fused.single(hidden, down, x, squares, scale=down_scale, live=live, **how)
        features = torch.empty_like(x)
        kernels.norm(x, None, self.norm, features, eps=self.eps, live=live, **how)
        logits = features.new_empty(lines * live, self.config.vocab_size, dtype=torch.float32)
        head, scale = self.head.parts[0]
        fused.single(features, head, logits, None, scale=scale, live=live, **how)
        return features, logits.unflatten(0, (lines, live))

    def _memory(self, rows: int) -> list[Tensor]:
        """Return memory for inputs of layers, attention, queries with keys and values, and the gated layer.

        Rows without a node hold numbers that nothing reads.
        """
        config, width = self.config, self.config.head_dim
        widths = (config.dim, self.heads * width, (self.heads + 2 * config.n_head) * width, config.ffn_dim)
        return [torch.empty(rows, width, dtype=self.dtype, device=self.norm.device) for width in widths]

    def _live(self, x: Float[Tensor, "m c"], attention: BlockAttention) -> Float[Tensor, "lines n c"]:
        """Return the rows that hold nodes."""
        return x.view(-1, attention.rows, x.shape[1])[:, : attention.live]


def without_top_p(
    sampling: Sampling, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]
) -> tuple[Float[Tensor, "b r n v"], Sampling]:
    """Return logits and a sampling without top-p that have the same distributions; one row counts as guided.

    torch finds the nucleus: another order of its running sum in fp32 would be another nucleus.
    """
    if not sampling.needs_torch or sampling.is_greedy:
        return logits, sampling
    if logits.shape[1] == 1:
        sampling = replace(sampling, guidance=1.0)
    return sampling.scores(logits, places)[:, None], relax.PLAIN


class KernelTarget(PreparedTarget):
    """A target that scores tokens by kernels, and prompts by torch, always the same number of them.

    Trees are walked by one kernel where it can.
    """

    follows_masks = False
    passes: ClassVar[WeightCache[Any]] = WeightCache(KernelPass)
    walks: ClassVar[bool] = True  # False once the kernel did not build or launch

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.refresh()

    def refresh(self) -> None:
        """Read the weights again if they have changed."""
        self.program: KernelPass = self.passes.get(self.module)

    @torch.no_grad()
    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts in passes of PROMPT_ROWS slots, so that the bits of each depend on nothing else."""
        read = partial(self.module.read, rows=rows, whole=whole, taps=taps, is_padded=True)
        size = max(PROMPT_ROWS // (rows * self.config.cls_token_num), 1)
        return Prompt.joined(list(read_in_passes(read, condition, size).values()))

    def forward(
        self,
        inputs: Float[Tensor, "lines n c"],
        positions: Int[Tensor, "lines n"],
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "lines n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score inputs, as `Target.__call__`; by torch without a `StaticCache`, or if slots of tokens are used
        again.
        """
        has_all = isinstance(cache, StaticCache) and cache.tokens == self.config.block_size
        if mask is None or slots is None or not has_all:
            return self.module(inputs, positions, mask, cache=cache, slots=slots, taps=taps)
        return self.program(inputs, positions, mask, cache=cache, slots=slots, taps=taps)

    def walk(self, verifier: Any, tree: Any, rows: Any) -> Verdict | None:
        """Walk a tree by one kernel if it can; kernels build in the steps before a capture."""
        if not KernelTarget.walks or not walk.takes(verifier, tree, rows):
            return None
        kinds = RejectionVerifier | RelaxedVerifier | CouplingVerifier
        if isinstance(rows, LogitRows) and isinstance(verifier, kinds):
            logits, sampling = without_top_p(rows.sampling, rows.logits, rows.places)
            rows = replace(rows, logits=logits, sampling=sampling)
        try:
            if isinstance(verifier, GumbelVerifier):
                return walk.match(tree, rows)
            if isinstance(verifier, CouplingVerifier) and verifier.relaxation is None:
                return couple.couple(verifier, tree, rows)
            if isinstance(verifier, CouplingVerifier):
                groups = walk.KernelGrouped(**vars(verifier.relaxation))
                return replace(verifier, relaxation=groups).verify(tree, rows, rows.noise)
            if isinstance(verifier, RejectionVerifier):
                return walk.walk(verifier, tree, rows)
            relaxed, inner = relax.KernelRows(verifier.relaxation, tree, rows), verifier.inner
            verdict = self.walk(inner, tree, relaxed) or inner.verify(tree, relaxed, rows.noise)
            return verifier.complete(verdict, tree, rows, relaxed)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise
            KernelTarget.walks = False
            LOG.warning("trees are walked by torch, and not by the GPU kernel: %s", one_line(error))
            return None

    def sampler(self, sampling: Sampling, noise: Any) -> Sampler | None:
        """Return the sampling kernel, None for top-p."""
        if sampling.needs_torch:
            return None

        def best(
            logits: Tensor, places: Tensor, *, width: int = 1, purpose: int = Purpose.TARGET, **into: Any
        ) -> Tensor:
            return kernels.sample(logits, places, noise.gumbel_table(purpose), sampling, width=width, **into)

        return best

    def ranker(self, sampling: Sampling, noise: Any) -> Ranker | None:
        """Return the sampling kernel that writes log q too, None at temperature 0."""
        if sampling.is_greedy:
            return None

        def ranked(
            logits: Tensor, places: Tensor, *, width: int, purpose: int | None, spread: float = 1.0
        ) -> tuple[Tensor, Float[Tensor, "b n v"], Float[Tensor, "b n k"]]:
            log_q = torch.empty(*places.shape, logits.shape[-1], dtype=torch.float32, device=logits.device)
            table = None if purpose is None else noise.gumbel_table(purpose)
            logits, rest = without_top_p(sampling, logits, places)
            chances, how = log_q.new_empty(*places.shape, width), {"width": width, "spread": spread}
            best = kernels.sample(logits, places, table, rest, log_q=log_q, chances=chances, **how)
            return best, log_q, chances

        return ranked


class FusedPass(KernelPass):
    """As `KernelPass`, for LlamaGen's layers, where batches of few rows run by the products of `fused`."""

    fuses = True


class FusedTarget(KernelTarget):
    """A target with the passes of `FusedPass`."""

    passes: ClassVar[WeightCache[Any]] = WeightCache(FusedPass)
