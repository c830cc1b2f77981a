"""EAGLE-1: one decoder layer that predicts the target's next feature (arXiv:2401.15077).

Pair j = (feature that predicts code j, code j) gives an estimate of the feature that predicts code j + 1, and the
target's own head turns it into a law. Two forms:

    guided  one row, on the guidance-combined feature F* = f_u + s (f_c - f_u), whose head logits are the guided
            logits. It starts at pair 0: the prompt is present only through features.
    rows    as released with LANTERN: both guidance rows, logits combined, and before pair 0 the features of the
            prompt, each paired with code 0's embedding.

Drafters of other kinds that grow trees in the same way (`drafters/eagle_drafter.py`) are modules derived from `Eagle`
that put in other answers to: what of the target is read (`taps`, `enter`), which layers run at a depth (`forward`), and
what makes a law of a feature (`logits`).
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.target_head import target_logits
from lantern.drafters.unroll import Unroll
from lantern.models.llamagen.config import TransformerConfig
from lantern.models.llamagen.layers import Attention, FeedForward, RMSNorm
from lantern.models.llamagen.rotary import rope_table, turns_at

IDENTITY_SCALE = 0.05
MAX_LAYERS = 64


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-1 drafter. `cls_token_num` counts its own conditioning slots: one less than its target's in
    form "rows", 0 in form "guided". `sees_padding`: it attends to the features of padded caption slots too.
    `layers` decoder layers, of which those after the first have a norm at their input.
    `target` is the digest of the weights it was trained for, as `lantern.io.weights_digest` gives it; None is unknown.
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
        if not 1 <= self.layers <= MAX_LAYERS:
            raise ValueError(f"layers is {self.layers}, wanted from 1 to {MAX_LAYERS}")
        if self.form not in ("guided", "rows"):
            raise ValueError(f'form is "{self.form}", wanted "guided" or "rows"')
        if self.has_input_norm:
            raise ValueError("has_input_norm is true, but EAGLE-1 drafters for LlamaGen have no norm at their input")
        if self.form == "guided" and self.cls_token_num:
            raise ValueError(f"cls_token_num is {self.cls_token_num}, wanted 0: the guided form reads no prompt slots")
        if self.n_head < 1 or self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise ValueError(f"dim {self.dim} over {self.n_head} heads: wanted a head size divisible by 4")
        if self.block_size < 1 or math.isqrt(self.block_size) ** 2 != self.block_size:
            raise ValueError(f"block_size is {self.block_size}, wanted a perfect square (grid x grid codes)")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> Self:
        """A drafter of its target's width: heads, feed-forward and rotary table as there."""
        form = changes.get("form", "guided")
        fields = {
            "dim": config.dim,
            "n_head": config.n_head,
            "ffn_dim": config.ffn_dim,
            "vocab_size": config.vocab_size,
            "block_size": config.block_size,
            "cls_token_num": config.cls_token_num - 1 if form == "rows" else 0,
            "norm_eps": config.norm_eps,
            "rope_base": config.rope_base,
        }
        return cls(**(fields | changes))


class EagleLayer(nn.Module):
    """A decoder layer, as the first of a drafter without a norm at its input; `number` is its place in the cache."""

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
        turns: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        cache: Any,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Attention, then feed-forward, each added to its input."""
        x = x + self.attention(self.attention_norm(x), turns, mask, layer=self.number, cache=cache, slots=slots)
        return x + self.feed_forward(self.ffn_norm(x))


class Eagle(nn.Module):
    """The drafter's weights. Its head is the target's, which it does not hold."""

    rope: Tensor
    layers: Any  # a ModuleList of EagleLayer, which the type checker takes for modules of any kind
    # The target's layers of which it reads what enters them; none where it reads the target's features.
    taps: tuple[int, ...] = ()

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=config.has_fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config, i, has_norm=i > 0) for i in range(config.layers))
        if config.form == "guided":
            # Times log s and added to the input: guidance may then vary, and s = 1 adds nothing.
            self.guidance = nn.Parameter(torch.zeros(config.dim))
        grid = math.isqrt(config.block_size)
        table = rope_table(grid, config.cls_token_num, config.dim // config.n_head, config.rope_base)
        self.register_buffer("rope", table, persistent=False)

    @property
    def reads(self) -> frozenset[str]:
        """Both rows' prompt, in form "rows"."""
        return frozenset({"prompt"} if self.config.form == "rows" else ())

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.embed_tokens.weight.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values: fused layers have one of their own."""
        return getattr(self.layers[0], "cache_dtype", self.dtype)

    @property
    def num_caches(self) -> int:
        """Layers that keep keys and values."""
        return len(self.layers)

    @property
    def projections(self) -> list[nn.Linear]:
        """What joins embeddings and features."""
        return [self.fc]

    def enter(self, given: Float[Tensor, "b n k"]) -> Float[Tensor, "b n c"]:
        """What is paired with a code, made of what the target said when it predicted that code."""
        return given.to(self.dtype)

    def logits(self, features: Float[Tensor, "b n c"], target: Any) -> Float[Tensor, "b n v"]:
        """What features say of the next code, fp32: by the target's own head."""
        return target_logits(target, features)

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """`init_weights` with the target's embeddings."""
        self.init_weights(target.tok_embeddings.weight.data, generator)

    def init_weights(self, embeddings: Float[Tensor, "v c"], generator: torch.Generator) -> None:
        """Starts as "the next feature is this one": fc = [0.05 I | I], output projections zero.

        `embeddings` are the target's, copied. Other linears are Normal(0, 0.02).
        """
        self.init_linears(generator)
        identity = torch.eye(self.config.dim)
        for fc in self.projections:
            fc.weight.data.copy_(torch.cat([IDENTITY_SCALE * identity, identity], dim=1))
            if fc.bias is not None:
                fc.bias.data.zero_()
        self.embed_tokens.weight.data.copy_(embeddings)

    def init_linears(self, generator: torch.Generator) -> None:
        """Starts every linear at random, and every layer as one that changes nothing."""
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
        """Next features of n pairs, of which the last `depth` on the way to each have drafted features.

        `positions` are rows of the rotary table: cls_token_num conditioning slots, then the grid cell of the pair's
        code. No mask means causal. `scales` is the guidance in force at each pair's feature, in form "guided";
        None is 1.
        """
        x, turns = self.told(self.fc(self.pair(features, tokens)), scales), turns_at(self.rope, positions)
        for layer in self.layers:
            x = layer(x, turns, mask, cache=cache, slots=slots)
        return x

    def pair(self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Embedding and feature side by side."""
        return torch.cat([self.embed_tokens(tokens), features], dim=-1)

    def told(self, x: Float[Tensor, "b n c"], scales: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n c"]:
        """With word of the guidance added, in form "guided"."""
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
        """Teacher-forced pass over pairs 0 .. n - 1: output j estimates the feature that predicts code j + 1.

        For training-time test (EAGLE-3, arXiv:2503.01840) give the same `unroll` to every pass over a batch:
        pass i takes the outputs of pass i - 1, shifted, as features, and sees true features only up to where
        drafting would have begun. Its first i - 1 outputs mean nothing.
        """
        positions = torch.arange(features.shape[1], device=features.device).expand(tokens.shape)
        positions = positions + self.config.cls_token_num
        if unroll is None:
            return self(features, tokens, positions, scales=scales)
        depth, mask = unroll.passes, unroll.next_mask(len(tokens), features.shape[1], features.device)
        return self(features, tokens, positions, mask, scales=scales, cache=unroll, slots=positions, depth=depth)

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Drafts of every code but the first: pass i takes the outputs of pass i - 1 as features."""
        given, count = self.given(examples), examples.codes.shape[1]
        rows, is_guided = given.shape[1], self.config.form == "guided"
        tokens = examples.codes[:, :-1].repeat_interleave(rows, 0)
        scales = examples.scales[:, None].expand(-1, count - 1) if is_guided else None
        unroll = Unroll() if is_guided else self._read_prompt(examples)
        features, made = self.enter(given[:, :, :-1].flatten(0, 1)), []
        for depth in range(1, depths + 1):
            out = self.training_forward(features, tokens, scales=scales, unroll=unroll)
            places = torch.arange(depth, count, device=tokens.device)
            made.append(self.predict(depth, places, out[:, depth - 1 :].unflatten(0, (-1, rows))))
            features = torch.cat([features[:, :1], self.again(out[:, :-1]).to(features.dtype)], dim=1)
        return made

    def given(self, examples: Examples) -> Float[Tensor, "b r n k"]:
        """What the target said when it predicted each code, for `enter` once rows are guided."""
        return examples.guided[:, None] if self.config.form == "guided" else examples.rows

    def again(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Its own outputs, as the next pass of training takes them in."""
        return features

    def predict(self, depth: int, places: Int[Tensor, " m"], said: Float[Tensor, "b r m c"]) -> Prediction:
        """A pass's outputs, as training reads them."""
        if self.config.form == "guided":
            return Prediction(depth, places, said[:, 0])
        return Prediction(depth, places, rows=said)

    def _read_prompt(self, examples: Examples) -> Unroll:
        """Runs the prompt's features, each paired with code 0's embedding, as drafting does before its first pair."""
        assert examples.prompt is not None and examples.mask is not None
        features, words = examples.prompt.flatten(0, 1), examples.mask[:, :-1].repeat_interleave(2, 0)
        sees = torch.ones_like(words) if self.config.sees_padding else words
        unroll = Unroll(sees)
        slots = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        mask = torch.tril(sees[:, None] | ~sees[:, :, None])
        self(features, torch.zeros_like(slots), slots, mask, cache=unroll, slots=slots)
        return unroll
