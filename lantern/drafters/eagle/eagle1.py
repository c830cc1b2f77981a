"""EAGLE-1: one decoder layer that predicts the target's next feature (arXiv:2401.15077).

Pair j = (feature that predicts token j, token j) gives an estimate of the feature that predicts token j + 1, and the
target's head maps it to a distribution. Two forms:

    guided  one row, on the guidance-combined feature F* = f_u + s (f_c - f_u), whose head logits are the guided
            logits. It starts at pair 0: the prompt enters only through features.
    rows    as released with LANTERN: both guidance rows, logits combined, and before pair 0 the features of the
            prompt, each paired with token 0's embedding. For targets of transformers, whose head need not be linear and
            whose prompts have no slots, it starts at pair 0.

Other drafters that grow trees in the same way (`drafters/eagle/drafter.py`) derive from `Eagle` and override what is
read of the target (`taps`, `enter`), what the layers read (`join`), which of them run at a depth (`run_layers`), and
how a feature becomes logits (`logits`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.weights import DraftLayer
from lantern.decoding.cache import StaticCache
from lantern.drafters.base import target_logits, token_embeddings
from lantern.drafters.eagle.unroll import Unroll
from lantern.drafters.examples import Examples, Prediction, Trainee
from lantern.models.llamagen.transformer import (
    LIMITS,
    Attention,
    FeedForward,
    RMSNorm,
    Rotary,
    TransformerConfig,
    check_grid,
    check_layer,
    check_limits,
    rope_table,
)

IDENTITY_SCALE = 0.05
MAX_LAYERS = 64


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of an EAGLE-1 drafter. `cls_token_num` counts its own conditioning slots: one less than its target's in
    form "rows", 0 in form "guided". With `sees_padding` it also attends to the features of padded caption slots.
    `layers` decoder layers, of which those after the first have a norm at their input.
    `target` is the digest of the weights it was trained for (`lantern.core.io.weights_digest`), None if unknown.
    ValueError for a value out of range.
    """

    dim: int
    n_head: int
    ffn_dim: int
    vocab_size: int
    block_size: int
    cls_token_num: int = 0
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    has_fc_bias: bool = True
    has_input_norm: bool = False
    sees_padding: bool = True
    kind: str = "eagle1"
    form: str = "guided"
    target: str | None = None
    layers: int = 1

    def __post_init__(self) -> None:
        if self.kind != type(self).kind:
            raise ValueError(f'kind is "{self.kind}", wanted "{type(self).kind}"')
        if not 1 <= self.layers <= MAX_LAYERS:
            raise ValueError(f"layers is {self.layers}, wanted from 1 to {MAX_LAYERS}")
        if self.form not in ("guided", "rows"):
            raise ValueError(f'form is "{self.form}", wanted "guided" or "rows"')
        if self.has_input_norm:
            raise ValueError("has_input_norm is true, but EAGLE-1 drafters for LlamaGen have no norm at their input")
        if self.form == "guided" and self.cls_token_num:
            raise ValueError(f"cls_token_num is {self.cls_token_num}, wanted 0: the guided form reads no prompt slots")
        if not 0 <= self.cls_token_num <= LIMITS["cls_token_num"]:
            raise ValueError(f"cls_token_num is {self.cls_token_num}, wanted from 0 to {LIMITS['cls_token_num']}")
        check_layer(self.dim, self.n_head, self.rope_base, self.norm_eps)
        check_grid(self.block_size)
        check_limits(self, "dim", "n_head", "ffn_dim", "vocab_size", "block_size")

    @classmethod
    def for_target(cls, config: Any, **changes: Any) -> Self:
        """Return a config with its target's width, heads, feed-forward and rotary table."""
        same = ("dim", "ffn_dim", "vocab_size", "block_size", "norm_eps", "rope_base")
        fields = {"n_head": config.query_heads, **{name: getattr(config, name) for name in same}}
        fields["cls_token_num"] = max(config.cls_token_num - 1, 0) if changes.get("form") == "rows" else 0
        return cls(**(fields | changes))


class EagleLayer(DraftLayer):
    """A decoder layer with an optional norm at its input; `number` is its layer in the cache."""

    is_packable = True

    def __init__(self, config: EagleConfig, number: int = 0, *, has_norm: bool = False) -> None:
        super().__init__()
        self.number = number
        self.attention_norm = RMSNorm(config.dim, config.norm_eps) if has_norm else nn.Identity()
        self.attention = Attention(TransformerConfig(dim=config.dim, n_head=config.n_head))
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Add attention, then feed-forward, to the input."""
        x = x + self.attention(self.attention_norm(x), factors, mask, layer=self.number, cache=cache, slots=slots)
        return x + self.feed_forward(self.ffn_norm(x))


class Eagle(Trainee):
    """The drafter's weights, without a head: the target's head is used."""

    layers: Any  # a ModuleList of EagleLayer
    # The target's layers whose inputs it reads; empty if it reads the target's features.
    taps: tuple[int, ...] = ()

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=config.has_fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config, i, has_norm=i > 0) for i in range(config.layers))
        if config.form == "guided":
            # Times log s and added to the input, so the guidance scale s may vary; s = 1 adds 0.
            self.guidance = nn.Parameter(torch.zeros(config.dim))
        grid = math.isqrt(config.block_size)
        self.rotary = Rotary(rope_table(grid, config.cls_token_num, config.dim // config.n_head, config.rope_base))

    @property
    def reads(self) -> frozenset[str]:
        """Extras of `Examples` that training needs: the prompt, in form "rows" with slots for it."""
        return frozenset({"prompt"} if self.config.cls_token_num else ())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""
        return self.embed_tokens.weight.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.layers[0].cache_dtype

    @property
    def projections(self) -> list[nn.Linear]:
        """The linears that join embeddings and features."""
        return [self.fc]

    def enter(self, features: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n c"]:
        """Return the feature that is paired with a token, from the target's at the prediction of that token."""
        return features.to(self.dtype)

    def new_cache(self, earlier: Any, kind: type[StaticCache] = StaticCache, **sizes: Any) -> Any:
        """Return a cache of its layers, an `earlier` one if that has the same sizes."""
        heads = {"heads": self.config.n_head, "head_dim": self.config.dim // self.config.n_head}
        return kind.of(earlier, layers=len(self.layers), dtype=self.cache_dtype, **heads, **sizes)

    def sees(self, words: Bool[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
        """Return which slots of a prompt are seen: those of words, or all."""
        return torch.ones_like(words) if self.config.sees_padding else words

    def read_prompt(
        self, features: Float[Tensor, "b t c"], sees: Bool[Tensor, "b t"], cache: Any, width: int | None = None
    ) -> None:
        """Run a prompt's features, each paired with token 0's embedding; masks of the cache are `width` wide."""
        slots = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        mask = torch.tril(sees[:, None] | ~sees[:, :, None])
        mask = nn.functional.pad(mask, (0, (width or mask.shape[2]) - mask.shape[2]))
        self(features.to(self.dtype), torch.zeros_like(slots), slots, mask, cache=cache, slots=slots)

    def logits(self, features: Float[Tensor, "b n c"], target: Any) -> Float[Tensor, "b n v"]:
        """Return the fp32 logits of the next token, by the target's head."""
        return target_logits(target, features)

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Run `init_weights` with the target's embeddings."""
        self.init_weights(token_embeddings(target, self.config.vocab_size), generator)

    def init_weights(self, embeddings: Float[Tensor, "v c"], generator: torch.Generator) -> None:
        """Start at "the next feature equals this one": fc = [0.05 I | I], output projections zero.

        The target's `embeddings` are copied. Other linears are Normal(0, 0.02).
        """
        self.init_linears(generator)
        identity = torch.eye(self.config.dim)
        for fc in self.projections:
            fc.weight.data.copy_(torch.cat([IDENTITY_SCALE * identity, identity], dim=1))
            if fc.bias is not None:
                fc.bias.data.zero_()
        self.embed_tokens.weight.data.copy_(embeddings)

    def init_linears(self, generator: torch.Generator) -> None:
        """Set every linear to Normal(0, 0.02) and every layer to the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0.0, 0.02, generator=generator)
        for layer in self.layers:
            layer.attention.wo.weight.data.zero_()
            layer.feed_forward.w2.weight.data.zero_()

    def forward(
        self,
        features: Float[Tensor, "b n c"],
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None = None,
        *,
        scales: Float[Tensor, "b n"] | None = None,
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
        depth: int = 0,
    ) -> Float[Tensor, "b n c"]:
        """Return the next features of n pairs; the last `depth` pairs before each have drafted features.

        `positions` are rows of the rotary table: cls_token_num conditioning slots, then the grid cell of the pair's
        token. No mask means causal. `scales` is the guidance scale at each pair's feature, in form "guided";
        None is 1.
        """
        factors = self.rotary(positions)
        return self.run_layers(features, tokens, factors, scales, depth, mask=mask, cache=cache, slots=slots)

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
        cache: Any,
        slots: Int[Tensor, " n"],
        depth: int = 0,
    ) -> Float[Tensor, "b r n c"]:
        """Return the next features of staged pairs of all rows of images, after `known` committed pairs.

        `places` are those of the tokens in the image, `sees(places, ancestors)` is the mask.
        """
        rows = features.shape[1]
        positions = (places + self.config.cls_token_num).repeat_interleave(rows, 0)
        slots = slots.expand(len(positions), -1)
        flat, tokens = features.flatten(0, 1), tokens.repeat_interleave(rows, 0)
        mask = sees(places, ancestors)
        out = self(flat, tokens, positions, mask, scales=scales, cache=cache, slots=slots, depth=depth)
        return out.unflatten(0, features.shape[:2])

    def run_layers(
        self,
        features: Float[Tensor, "b n c"],
        tokens: Int[Tensor, "b n"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        scales: Float[Tensor, "b n"] | None,
        depth: int,
        **attention: Any,
    ) -> Float[Tensor, "b n c"]:
        """Return the next features; `attention` is the layers' mask, cache and slots."""
        x = self.join(features, tokens, scales)
        for layer in self.layers:
            x = layer(x, factors, **attention)
        return x

    def join(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n d"]:
        """Return what the first layer reads of pairs and the guidance scales at their features."""
        return self.add_scale(self.fc(self.pair(features, tokens)), scales)

    def pair(self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Return embedding and feature, concatenated."""
        return torch.cat([self.embed_tokens(tokens), features], dim=-1)

    def add_scale(self, x: Float[Tensor, "b n c"], scales: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n c"]:
        """Add the encoding of the guidance scale, in form "guided"."""
        if scales is None or self.config.form != "guided":
            return x
        return x + (scales.log()[..., None] * self.guidance).to(x.dtype)

    def training_forward(
        self,
        features: Float[Tensor, "b n c"],
        tokens: Int[Tensor, "b n"],
        *,
        scales: Float[Tensor, "b n"] | None = None,
        unroll: Unroll | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Run a teacher-forced pass over pairs 0 .. n - 1: output j estimates the feature that predicts token j + 1.

        For training-time test (EAGLE-3, arXiv:2503.01840) pass the same `unroll` to every pass over a batch: pass i
        reads the outputs of pass i - 1, shifted, as features, and sees true features only up to where drafting would
        have started. Its first i - 1 outputs are undefined.
        """
        positions = torch.arange(features.shape[1], device=features.device).expand(tokens.shape)
        positions = positions + self.config.cls_token_num
        if unroll is None:
            return self(features, tokens, positions, scales=scales)
        depth, mask = unroll.passes, unroll.next_mask(len(tokens), features.shape[1], features.device)
        return self(features, tokens, positions, mask, scales=scales, cache=unroll, slots=positions, depth=depth)

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return drafts of every token but the first; pass i reads the outputs of pass i - 1 as features."""
        inputs, count = self.inputs(examples), examples.tokens.shape[1]
        rows, is_guided = inputs.shape[1], self.config.form == "guided"
        tokens = examples.tokens[:, :-1].repeat_interleave(rows, 0)
        scales = examples.scales[:, None].expand(-1, count - 1) if is_guided else None
        unroll = self.unrolled(examples)
        features, made = self.enter(inputs[:, :, :-1].flatten(0, 1)), []
        for depth in range(1, depths + 1):
            out = self.training_forward(features, tokens, scales=scales, unroll=unroll)
            places = torch.arange(depth, count, device=tokens.device)
            made.append(self.predict(depth, places, out[:, depth - 1 :].unflatten(0, (-1, rows))))
            features = torch.cat([features[:, :1], self.feed_back(out[:, :-1]).to(features.dtype)], dim=1)
        return made

    def unrolled(self, examples: Examples) -> Unroll:
        """Return the cache of a training-time test; it begins with the prompt, as drafting does, if it is read."""
        unroll = Unroll()
        if "prompt" in self.reads:
            assert examples.prompt is not None and examples.mask is not None
            unroll.prompt = self.sees(examples.mask[:, :-1]).repeat_interleave(2, 0)
            self.read_prompt(examples.prompt.flatten(0, 1), unroll.prompt, unroll)
        return unroll

    def inputs(self, examples: Examples) -> Float[Tensor, "b r n k"]:
        """Return the target's features at the prediction of each token, as `enter` reads them."""
        return examples.guided[:, None] if self.config.form == "guided" else examples.rows

    def feed_back(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return its own outputs as the next pass of training reads them."""
        return features

    def predict(self, depth: int, places: Int[Tensor, " m"], predicted: Float[Tensor, "b r m c"]) -> Prediction:
        """Return the outputs of a pass as a `Prediction`."""
        if self.config.form == "guided":
            return Prediction(depth, places, predicted[:, 0])
        return Prediction(depth, places, rows=predicted)
