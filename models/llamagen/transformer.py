"""The LlamaGen transformer: caption or class in, logits over VQ tokens out (arXiv:2406.06525, section 3.2).

In this order: its shape and the sizes that were released, two-dimensional rotary positions, the embedders of classes
and captions, the layers, the transformer, the parts of its pass over prompts.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.config import check_number
from lantern.core.types import Condition, Prompt, Raster, Scores, Target
from lantern.core.weights import left_out

# A config past these is a damaged file, not a model: refused before anything is allocated.
LIMITS = {
    "dim": 1 << 16,
    "ffn_dim": 1 << 18,
    "n_layer": 256,
    "n_head": 1024,
    "head_dim": 1024,
    "multiple_of": 1 << 16,
    "cls_token_num": 1 << 13,
    "vocab_size": 1 << 20,
    "caption_dim": 1 << 16,
    "num_classes": 1 << 20,
    "block_size": 1 << 16,
    # of a tokenizer
    **{"codebook_size": 1 << 20, "codebook_embed_dim": 4096, "num_res_blocks": 64},
    **{"z_channels": 1 << 16, "ch": 1 << 14},
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
    if dim // n_head > LIMITS["head_dim"]:
        raise ValueError(f"dim {dim} over {n_head} heads: wanted a head size of at most {LIMITS['head_dim']}")
    if not 1 < rope_base <= 1e9:
        raise ValueError(f"rope_base is {rope_base:g}, wanted above 1, at most 1e9")
    if not 0 < norm_eps < 1:
        raise ValueError(f"norm_eps is {norm_eps:g}, wanted above 0, below 1")


def check_grid(block_size: int) -> None:
    """Raise ValueError for a number of tokens that is no square grid."""
    if block_size < 1 or math.isqrt(block_size) ** 2 != block_size:
        raise ValueError(f"block_size is {block_size}, wanted a perfect square (grid x grid tokens)")


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a LlamaGen transformer, in the reference's field names.

    `block_size` is the number of tokens of a picture, a perfect square; `cls_token_num` the number of
    conditioning slots (1 for classes, the caption length for text). ValueError for a value out of range.
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
    family: ClassVar = "llamagen"

    def __post_init__(self) -> None:
        check_grid(self.block_size)
        check_layer(self.dim, self.n_head, self.rope_base, self.norm_eps)
        if self.n_kv_head not in (None, self.n_head):
            raise ValueError(f"n_kv_head is {self.n_kv_head}, wanted {self.n_head}: grouped queries are in no release")
        check_limits(self, *(field.name for field in dataclasses.fields(self) if field.name in LIMITS))
        for name in ("token_dropout_p", "attn_dropout_p", "resid_dropout_p", "ffn_dropout_p", "class_dropout_prob"):
            check_number(name, vars(self)[name], 0, 1)
        if self.ffn_dim_multiplier is not None and not 0 < self.ffn_dim_multiplier <= 64:
            raise ValueError(f"ffn_dim_multiplier is {self.ffn_dim_multiplier:g}, wanted above 0, at most 64")

    @property
    def grid(self) -> int:
        """Side of the square token grid."""
        return math.isqrt(self.block_size)

    @property
    def raster(self) -> Raster:
        """The square grid of tokens, without newlines."""
        return Raster(self.grid, self.grid)

    def cache_dtype(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of keys and values: on a CPU fp32, as rotated keys are, with which attention is faster."""
        return torch.float32 if device.type == "cpu" else dtype

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_head

    @property
    def query_heads(self) -> int:
        """Number of heads of queries, the same as of keys."""
        return self.n_head

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


def rope_table(grid: int, prefix: int, head_dim: int, base: float) -> Float[Tensor, "p half 2"]:
    """Return the two-dimensional rotary table (cos, sin); its first `prefix` rows are ZERO, not the identity.

    Half the frequencies belong to the row, half to the column. Zero rows make queries and keys of every
    conditioning slot exactly zero, as in the released models.
    """
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(0, half, 2)[: half // 2].float() / half)
    angles = torch.outer(torch.arange(grid).float(), frequencies)
    axes = (angles[:, None].expand(grid, grid, -1), angles[None].expand(grid, grid, -1))
    factor = torch.cat(axes, dim=-1).reshape(grid * grid, half)
    table = torch.stack([factor.cos(), factor.sin()], dim=-1)
    return torch.cat([table.new_zeros(prefix, half, 2), table])


def rotate(x: Float[Tensor, "b n k h d"], factors: Float[Tensor, "b n k 1 half 2"]) -> Float[Tensor, "b n k h d"]:
    """Rotate interleaved pairs (x[2i], x[2i+1]) as complex numbers; the result is fp32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if not torch.compiler.is_compiling():
        product = torch.view_as_complex(pairs) * torch.view_as_complex(factors)
        return torch.view_as_real(product).flatten(-2)
    even, odd = pairs.unbind(-1)  # the compiler fuses real arithmetic only
    cos, sin = factors.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class Rotary(nn.Module):
    """The rotary table as a module. It stays in fp32 where weights are moved to less.

    `table` has rows of zeros for conditioning slots, then one row per token.
    """

    table: Tensor

    def __init__(self, table: Float[Tensor, "p half 2"]) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Int[Tensor, "b n"]) -> Float[Tensor, "b n 3 1 half 2"]:
        """Return the factors of queries, keys and values at rows of the table: (cos, sin), and (1, 0) for values."""
        factor = self.table[positions].float()
        rest = torch.zeros_like(factor)
        rest[..., 0] = 1.0
        return torch.stack([factor, factor, rest], dim=2)[:, :, :, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        table = self.table
        super()._apply(fn, recurse)
        if self.table.dtype != table.dtype:
            self.table = table.to(self.table.device)
        return self


class LabelEmbedder(nn.Module):
    """Class number to one conditioning slot; a row behind the classes is unconditional, if labels were dropped."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_classes = config.num_classes
        self.embedding_table = nn.Embedding(config.num_classes + (config.class_dropout_prob > 0), config.dim)

    def forward(self, labels: Int[Tensor, " b"]) -> Float[Tensor, "b 1 c"]:
        """Embed labels in [0, num_classes); num_classes itself is the unconditional one."""
        return self.embedding_table(labels)[:, None]

    def unconditional(self, labels: Int[Tensor, " b"]) -> Float[Tensor, "b 1 c"]:
        """Return the guidance row of each label; ValueError where no label was dropped in training."""
        if len(self.embedding_table.weight) == self.num_classes:
            raise ValueError("the model has no unconditional class, which guidance needs: give guidance 1")
        return self(torch.full_like(labels, self.num_classes))


class CaptionEmbedder(nn.Module):
    """Caption features to conditioning slots, with the stored unconditional caption."""

    uncond_embedding: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # no biases: a row of zeros, which is padding, stays zero
        fc1, fc2 = (nn.Linear(width, config.dim, bias=False) for width in (config.caption_dim, config.dim))
        self.cap_proj = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU("tanh"), fc2=fc2))
        # A buffer, as in the released files: random, never trained, and part of the weights.
        uncond = torch.empty(config.cls_token_num, config.caption_dim)
        self.register_buffer("uncond_embedding", nn.init.normal_(uncond, std=config.caption_dim**-0.5))

    def forward(self, captions: Float[Tensor, "b t e"]) -> Float[Tensor, "b t c"]:
        """Embed left-padded caption features; t may be shorter than cls_token_num (pads cut off)."""
        return self.cap_proj(captions)

    def unconditional(self, captions: Float[Tensor, "b t e"]) -> Float[Tensor, "b t c"]:
        """Return the guidance rows: the last t rows of the stored embedding, for any caption."""
        rows = self.uncond_embedding[-captions.shape[1] :].to(captions.dtype)
        return self.cap_proj(rows.expand(captions.shape[0], -1, -1))


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, cast back before the weight is applied (the order matters in bf16)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Normalise the last axis."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one operation on a CPU, where a mean is three
        scale = torch.rsqrt(length * length / x.shape[-1] + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Multi-head attention with one fused projection, rows [q | k | v]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.attn_dropout_p
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        layer: int,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Attend to the cache, or to x without one. No mask is causal; a float mask is added to the scores."""
        turned = rotate(self.wqkv(x).unflatten(-1, (3, self.n_head, -1)), factors)
        if cache is None:
            q, k, v = turned.to(x.dtype).transpose(1, 3).unbind(2)
        else:
            assert slots is not None
            k, v = cache.write(layer, slots, turned[:, :, 1:])
            q = turned[:, :, 0].transpose(1, 2).to(k.dtype)
        added, dropout = None if mask is None else mask[:, None], self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, added, is_causal=mask is None, dropout_p=dropout)
        return self.wo(out.transpose(1, 2).flatten(2).to(x.dtype))

    def project(self, x: Float[Tensor, "b n c"], first: int) -> Float[Tensor, "b n k"]:
        """Return the outputs of `wqkv` from `first` on; a layer with a hook, or of another library, computes all."""
        return self.wqkv(x)[..., first:] if left_out(self.wqkv) else F.linear(x, self.wqkv.weight[first:])

    def read(self, x: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> tuple[Tensor, Float[Tensor, "b h d"]]:
        """Attention of conditioning slots, whose queries and keys are zero: the mean of the values seen so far.

        Gives the output of every slot and the mean of all values, fp32, which is all that tokens see of the prompt.
        """
        values, words = self.project(x, 2 * x.shape[-1]).float(), mask[..., None]
        # of words over the words, of padding (which is on the left) over padding
        of_words = (values * words).cumsum(1) / words.long().cumsum(1).clamp(min=1)
        of_padding = values.cumsum(1) / torch.arange(1, values.shape[1] + 1, device=values.device)[:, None]
        means = torch.where(words, of_words, of_padding)
        return self.wo(means.to(x.dtype)), means[:, -1].unflatten(-1, (self.n_head, -1))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), no biases; w1 and w3 are one matrix here, two in files."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.register_state_dict_post_hook(_split_gate)
        self.register_load_state_dict_pre_hook(_join_gate)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Map dim -> hidden -> dim."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


def _split_gate(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    joined = state.pop(f"{prefix}w13.weight", None)
    if joined is not None:  # an adapter or a parametrization has another name for it
        state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = joined.chunk(2)


def _join_gate(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    parts = [state.pop(f"{prefix}{name}.weight", None) for name in ("w1", "w3")]
    if parts[0] is not None and parts[1] is not None:
        state[f"{prefix}w13.weight"] = torch.cat(parts)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.resid_dropout = nn.Dropout(config.resid_dropout_p)
        self.ffn_dropout = nn.Dropout(config.ffn_dropout_p)

    def forward(self, x: Float[Tensor, "b n c"], *where: Any, **how: Any) -> Float[Tensor, "b n c"]:
        """Attention, whose further arguments are given, then feed-forward, each added to its input."""
        return self._add(x, self.attention(self.attention_norm(x), *where, **how))

    def read(self, x: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> tuple[Tensor, Float[Tensor, "b h d"]]:
        """The same for conditioning slots, with the mean of their values."""
        attended, mean = self.attention.read(self.attention_norm(x), mask)
        return self._add(x, attended), mean

    def _add(self, x: Float[Tensor, "b n c"], attended: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        if not self.training:
            x = x + attended
            return x + self.feed_forward(self.ffn_norm(x))
        x = x + self.resid_dropout(attended)
        return x + self.ffn_dropout(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module, Target):
    """LlamaGen's transformer. One forward serves prefill, plain and tree passes: positions and mask are arguments."""

    layers: Any  # a ModuleList of Block, which the type checker takes for modules of any kind

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = LabelEmbedder(config) if config.model_type == "c2i" else CaptionEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.tok_dropout = nn.Dropout(config.token_dropout_p)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rotary = Rotary(rope_table(config.grid, config.cls_token_num, config.head_dim, config.rope_base))

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, initializer_range) for linears and embeddings, zero for the output head, as the reference does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.data.normal_(0.0, self.config.initializer_range, generator=generator)
        self.output.weight.data.zero_()

    def read(
        self,
        condition: Condition,
        rows: int,
        *,
        whole: bool = False,
        taps: tuple[int, ...] = (),
        is_padded: bool = False,
    ) -> Prompt:
        """Read the guidance rows of each prompt, as `Target.read`; with `is_padded` in all of the model's slots.

        Rotary rows of conditioning slots are zero, and so are their queries and keys: attention is a mean of values,
        and tokens see n words as one key of zeros, with log n added to its score and the mean as its value.

        Without `is_padded`, padding that all prompts share is cut off, which changes nothing but the order of sums.
        This order must not depend on the drafter, or tokens would differ from plain decoding's where two are nearly
        equal: what a drafter reads of padding comes from a pass of its own, and only from there. A negative caption is
        read under its own mask; tokens attend to its mean with the weight of the prompt's n words, as they do to the
        unconditional caption.
        """
        most, negative = self.config.cls_token_num, condition.negative if rows == 2 else None
        is_t2i = self.config.model_type == "t2i"
        if (condition.embeddings if is_t2i else condition.labels) is None:
            raise ValueError(f"this model takes {'captions' if is_t2i else 'class labels'}, got another condition")
        if negative is not None and whole:
            raise ValueError(
                "this drafter reads the slots of the prompt, and takes no negative prompt: use another method"
            )
        longest = 1  # of labels
        if condition.mask is not None:
            if bool((condition.mask[:, 1:] < condition.mask[:, :-1]).any()):
                raise ValueError(
                    "the caption mask has padding behind words, wanted it on the left: rotate the captions"
                )
            longest = max(int(condition.mask.sum(1).max()), 1)
        if longest > most:
            raise ValueError(f"the condition has {longest} slots, the model takes at most {most}")
        inputs, mask = _embedded(self, condition, most if is_padded or negative is not None else longest, rows)
        counts, seen = mask.sum(1), mask[:, None].expand(-1, rows, -1)
        if negative is not None:
            other, its = _embedded(self, negative, most, 1)
            inputs, seen = torch.cat([inputs[:, :1], other], 1), torch.stack([mask, its], 1)
        features, means, tapped = _read_slots(self, inputs, seen, taps)
        logits = self.head(features[:, :, -1:])
        if not whole:
            features, tapped, mask = features[:, :, -1:], None if tapped is None else tapped[:, :, -1:], mask[:, -1:]
        elif missing := (most - longest if condition.labels is None and not is_padded else 0):
            inputs, mask = _embedded(self, condition, most, rows)
            padded, _, entered = _read_slots(self, inputs, mask[:, None].expand(-1, rows, -1), taps)
            # padding sees padding; the last slot gives token 0, be it a word or not
            is_own = F.pad(mask[:, :-1], (0, 1), value=True)[:, None, :, None]
            features = torch.where(is_own, F.pad(features, (0, 0, missing, 0)), padded)
            if tapped is not None and entered is not None:
                tapped = torch.where(is_own, F.pad(tapped, (0, 0, missing, 0)), entered)
        weight = self.tok_embeddings.weight
        dtype = self.config.cache_dtype(weight.device, weight.dtype)
        scores = word_scores(counts, dtype)
        values = means[:, :, None, :, :, None].expand(-1, -1, -1, -1, -1, scores.shape[1], -1).to(dtype)
        entries = torch.cat([torch.zeros_like(values), values], 2)
        first = torch.zeros(len(mask), rows, dtype=torch.long, device=mask.device)
        return Prompt(entries, scores[:, None].expand(-1, rows, -1), first, logits, features, mask, tapped)

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Return fp32 logits of features after the final norm."""
        return self.output(features).float()

    def features(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        entered: dict[int, Tensor] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Run the layers and the final norm over embedded inputs.

        `positions` are rows of the rotary table: conditioning slots first (cls_token_num of them), then the
        tokens in raster order. A boolean `mask` selects the cache slots (without a cache: the inputs)
        that each input attends to; a float mask is added to the scores; None is causal.
        With a cache, keys and values `(b n 2 h d)` go to `slots`: `cache.write(layer, slots, fresh)` stores them, and
        returns all keys and all values `(b h s d)` of the layer. `entered` receives the inputs of the layers that are
        its keys.
        """
        factors = self.rotary(positions)
        x = self.tok_dropout(inputs)
        for layer, block in enumerate(self.layers):
            if entered is not None and layer in entered:
                entered[layer] = x
            x = block(x, factors, mask, layer=layer, cache=cache, slots=slots)
        return self.norm(x)

    def read_slots(
        self, inputs: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"], *, entered: dict[int, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "l b h d"]]:
        """Return features of conditioning slots (padding on the left), and the mean value of each layer over the words.

        `features` computes the same without the shortcut of `read`. `entered` as there.
        """
        x, means = inputs, []
        for layer, block in enumerate(self.layers):
            if entered is not None and layer in entered:
                entered[layer] = x
            x, mean = block.read(x, mask)
            means.append(mean)
        return self.norm(x), torch.stack(means)

    def forward(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Run `features` and the head: row i of the logits is the distribution of the token that follows input i.

        `taps` are layers whose inputs are returned, concatenated. If a cache needs more rows than there are
        (`least_rows`), the last input is repeated and its scores are dropped.
        """
        count, least = inputs.shape[1], -(-(0 if cache is None else cache.least_rows) // inputs.shape[0])
        if count < least:
            assert slots is not None and mask is not None
            whole = (inputs, positions, mask, slots)
            more = [torch.cat([x, x[:, -1:].expand(-1, least - count, *x.shape[2:])], dim=1) for x in whole]
            scores = self(*more[:3], cache=cache, slots=more[3], taps=taps)
            tapped = None if scores.tapped is None else scores.tapped[:, :count]
            return Scores(scores.logits[:, :count], scores.features[:, :count], tapped)
        entered = dict.fromkeys(taps, inputs)
        features = self.features(inputs, positions, mask, cache=cache, slots=slots, entered=entered)
        tapped = torch.cat([entered[layer] for layer in taps], dim=-1) if taps else None
        return Scores(self.head(features), features, tapped)


def prefix_mask(valid: Bool[Tensor, "b t"], tokens: int) -> Bool[Tensor, "b n n"]:
    """Return the causal mask over t conditioning slots and `tokens` tokens; padding is visible to itself alone."""
    count = valid.shape[1] + tokens
    seen = F.pad(valid, (0, tokens), value=True)
    mask = torch.ones(count, count, dtype=torch.bool, device=valid.device).tril() & seen[:, None]
    return mask | torch.eye(count, dtype=torch.bool, device=valid.device)


def word_scores(counts: Int[Tensor, " b"], dtype: torch.dtype) -> Float[Tensor, "b p"]:
    """Return what is added to the attention scores of a prompt's slots: log n for n words, in one slot or in two.

    In half precision log n is off by up to 1.6 %. A second slot of the same value compensates for the rounding.
    """
    logs = counts.double().log()
    if dtype == torch.float32:
        return logs[:, None]
    first = (logs * (1 - 2**-7)).to(dtype).double()
    return torch.stack([first, (counts.double() - first.exp()).clamp(min=0).log().to(dtype).double()], 1)


def _embedded(
    target: Any, condition: Condition, slots: int, rows: int
) -> tuple[Float[Tensor, "b r t c"], Bool[Tensor, "b t"]]:
    """Return conditional and, for two rows, unconditional inputs in so many slots, and which are no padding."""
    if condition.labels is not None:
        given, mask = condition.labels, torch.ones_like(condition.labels, dtype=torch.bool)[:, None]
    else:
        assert condition.embeddings is not None and condition.mask is not None
        missing = slots - condition.embeddings.shape[1]  # cut off where negative
        given = F.pad(condition.embeddings.to(target.tok_embeddings.weight.dtype), (0, 0, missing, 0))
        mask = F.pad(condition.mask, (missing, 0))
    embed = target.cls_embedding
    embedded = [embed(given)] if rows == 1 else [embed(given), embed.unconditional(given)]
    return torch.stack(embedded, 1), mask


def _read_slots(
    target: Any, inputs: Float[Tensor, "b r t c"], seen: Bool[Tensor, "b r t"], taps: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features `(b r t c)`, mean values `(b l r h d)`, and the inputs of tapped layers side by side."""
    entered = dict.fromkeys(taps, inputs)
    features, means = target.read_slots(inputs.flatten(0, 1), seen.flatten(0, 1), entered=entered)
    shape = inputs.shape[:2]
    tapped = torch.cat([entered[layer] for layer in taps], -1).unflatten(0, shape) if taps else None
    return features.unflatten(0, shape), means.unflatten(1, shape).transpose(0, 1), tapped
