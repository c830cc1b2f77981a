"""The networks of EAGLE-1, EAGLE-3 and PosS: decoder layers that predict the target's next feature.

EAGLE-1 (arXiv:2401.15077) has one of them. Pair j = (feature that predicts token j, token j) gives an estimate of the
feature that predicts token j + 1, and the target's head maps it to a distribution. Two forms:

    guided  one row, on the guidance-combined feature F* = f_u + s (f_c - f_u), whose head logits are the guided
            logits. It starts at pair 0: the prompt enters only through features.
    rows    as released with LANTERN: both guidance rows, logits combined, and before pair 0 the features of the
            prompt, each paired with token 0's embedding. For targets of transformers, whose head need not be linear and
            whose prompts have no slots, it starts at pair 0.

Other drafters that grow trees in the same way (`drafters/eagle/drafter.py`) derive from `Eagle` and override what is
read of the target (`taps`, `enter`), what the layers read (`join`), which of them run at a depth (`forward`), how a
feature becomes logits (`logits`), and whether training feeds features back without gradients (`detaches`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.weights import DraftLayer
from lantern.decoding.cache import StaticCache
from lantern.drafters.base import Examples, Prediction, Trainee, fused_layers, target_logits, token_embeddings
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
    rotate,
)

IDENTITY_SCALE = 0.05
MAX_LAYERS = 64


class Unroll:
    """Keys of all `passes` of a training-time test so far, as a cache that grows by one pass at a time.

    Every pass sees what drafting would see (EAGLE-3, arXiv:2503.01840). Query j of pass i sees true features (pass 1)
    at j - i + 1 and before, and of pass m > 1 the feature at j - i + m:

        pass 2, n = 3     | pass 1 | pass 2
        j = 0             | . . .  | 1 . .
        j = 1             | 1 . .  | . 1 .
        j = 2             | 1 1 .  | . . 1

    A drafter that reads a prompt sets `prompt`, the mask of its slots that the tokens see, and runs the prompt through
    this cache before the first pass. Every pass then sees the prompt, to the left of the columns above. `globe` is
    added to all features.
    """

    least_rows = 0
    globe: Tensor | float = 0.0

    def __init__(self, prompt: Bool[Tensor, "b t"] | None = None) -> None:
        self.passes = 0
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.prompt = prompt

    def next_mask(self, images: int, pairs: int, device: torch.device) -> Bool[Tensor, "b n s"]:
        """Start a pass and return its mask."""
        here, there = torch.arange(pairs, device=device)[:, None], torch.arange(pairs, device=device)
        done, self.passes = self.passes, self.passes + 1
        parts = [there <= here - done] + [there == here - done + m for m in range(1, done + 1)]
        own = torch.cat(parts, dim=1).expand(images, -1, -1)
        if self.prompt is None:
            return own
        return torch.cat([self.prompt[:, None].expand(-1, pairs, -1), own], dim=2)

    def write(
        self, layer: int, slots: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"]
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Store this pass of a layer and return all passes of that layer."""
        keys, values = self._kept.setdefault(layer, ([], []))
        for kept, now in zip((keys, values), fresh.transpose(1, 3).unbind(2), strict=True):
            kept.append(now)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


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
    # whether the next pass of training reads its outputs without gradients
    detaches: ClassVar[bool] = False

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
        x, factors = self.join(features, tokens, scales), self.rotary(positions)
        for layer in self.layers:
            x = layer(x, factors, mask=mask, cache=cache, slots=slots)
        return x

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

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return drafts of every token but the first, in teacher-forced passes over the pairs of known tokens.

        By training-time test (EAGLE-3, arXiv:2503.01840) pass i reads the outputs of pass i - 1, shifted, as features,
        and sees true features only up to where drafting would have started. Its first i - 1 outputs are undefined.
        """
        inputs, count = self.inputs(examples), examples.tokens.shape[1]
        rows, is_guided = inputs.shape[1], self.config.form == "guided"
        tokens = examples.tokens[:, :-1].repeat_interleave(rows, 0)
        scales = examples.scales[:, None].expand(-1, count - 1) if is_guided else None
        positions = torch.arange(count - 1, device=tokens.device).expand(tokens.shape) + self.config.cls_token_num
        unroll, how = self.unrolled(examples), {"scales": scales, "slots": positions}
        features, made = self.enter(inputs[:, :, :-1].flatten(0, 1)), []
        for depth in range(1, depths + 1):
            mask = unroll.next_mask(len(tokens), count - 1, tokens.device)
            out = self(features + unroll.globe, tokens, positions, mask, cache=unroll, depth=depth - 1, **how)
            places = torch.arange(depth, count, device=tokens.device)
            made.append(self.predict(depth, places, out[:, depth - 1 :].unflatten(0, (-1, rows))))
            drafted = out[:, :-1].detach() if self.detaches else out[:, :-1]
            features = torch.cat([features[:, :1], drafted.to(features.dtype)], dim=1)
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

    def predict(self, depth: int, places: Int[Tensor, " m"], predicted: Float[Tensor, "b r m c"]) -> Prediction:
        """Return the outputs of a pass as a `Prediction`."""
        if self.config.form == "guided":
            return Prediction(depth, places, predicted[:, 0])
        return Prediction(depth, places, rows=predicted)


@dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Sizes of an EAGLE-3 drafter; `fused` are the target's layers whose inputs it reads.

    Training takes them from `fused_layers`: all three, or the last ones. ValueError for a value out of range.
    """

    kind: str = "eagle3"
    fused: tuple[int, ...] = (2, 8, 13)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form != "guided":
            raise ValueError(f'form is "{self.form}", wanted "guided": an EAGLE-3 drafter reads guided layers')
        if not self.fused or min(self.fused) < 0:
            raise ValueError(f"fused is {list(self.fused)}, wanted numbers of layers, from 0")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> Self:
        """Return a config with its target's width that reads three of its layers, or those of `fused`."""
        fused = tuple(changes.get("fused", fused_layers(config.n_layer)))
        return super().for_target(config, **(changes | {"fused": fused}))


class Eagle3Layer(DraftLayer):
    """A decoder layer that reads embedding and feature, concatenated, and adds to the feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(TransformerConfig(dim=config.dim, n_head=config.n_head))
        self.attention.wqkv = nn.Linear(2 * config.dim, 3 * config.dim, bias=False)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, pairs: Float[Tensor, "b n d"], factors: Float[Tensor, "b n 3 1 half 2"], **attention: Any
    ) -> Float[Tensor, "b n c"]:
        """Add attention, then feed-forward, to the feature; `attention` is as for `EagleLayer`."""
        embedded, x = pairs.chunk(2, dim=-1)
        read = torch.cat([self.embedding_norm(embedded), self.attention_norm(x)], dim=-1)
        x = x + self.attention(read, factors, layer=0, **attention)
        return x + self.feed_forward(self.ffn_norm(x))


class Eagle3(Eagle):
    """EAGLE-3: reads three layers of the target, feeds on its own outputs, has a head of its own (arXiv:2503.01840).

    The inputs of the layers 2, L/2 and L - 3 of the target at the prediction of token j are guided like logits,
    F*_l = u_l + s (c_l - u_l), concatenated and mapped to one feature by `fc`. One decoder layer, whose attention reads
    [norm(embedding) | norm(feature)], predicts the next feature, which is fed back as the feature of the next draft.
    Its features need not be near the target's: its own `norm` and head `output` give distributions, and the loss is on
    distributions only, over several depths (training-time test, section 3.2). Here the head covers the whole codebook.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.taps = config.fused
        self.fc = nn.Linear(len(config.fused) * config.dim, config.dim, bias=False)
        rest = [EagleLayer(config, i, has_norm=True) for i in range(1, config.layers)]
        self.layers = nn.ModuleList([Eagle3Layer(config), *rest])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def reads(self) -> frozenset[str]:
        """Extras of `Examples` that training needs: the tapped layers."""
        return frozenset({"layers"})

    def enter(self, features: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n c"]:
        """Map guided layers, concatenated, to one feature."""
        return self.fc(features.to(self.dtype))

    def logits(self, features: Float[Tensor, "b n c"], target: Any) -> Float[Tensor, "b n v"]:
        """Return the fp32 logits of its own head."""
        return self.output(self.norm(features.to(self.dtype))).float()

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Start as the target's norm and head applied to the last tapped layer, with the target's embeddings.

        A head that is not linear cannot be copied: the own head then starts as other linears do. ValueError for layers
        that training does not record.
        """
        known = fused_layers(target.config.n_layer)
        if self.taps != known[-len(self.taps) :]:
            raise ValueError(f"fused is {list(self.taps)}, wanted {list(known)} or the last of these")
        self.init_linears(generator)
        self.fc.weight.data.zero_()
        self.fc.weight.data[:, -self.config.dim :] = torch.eye(self.config.dim)
        self.embed_tokens.weight.data.copy_(token_embeddings(target, self.config.vocab_size))
        with torch.no_grad():  # some norms store their scale less 1; eps is nothing beside 1024 squared
            scale = target.norm(target.tok_embeddings.weight.new_full((self.config.dim,), 1024.0))
        self.norm.weight.data.copy_(scale)
        if isinstance(target.output, nn.Linear):
            self.output.weight.data.copy_(target.output.weight.data)

    def join(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n d"]:
        """Return embeddings and features of its own space, which carry the guidance scales, concatenated."""
        return self.pair(self.add_scale(features, scales), tokens)

    def inputs(self, examples: Examples) -> Float[Tensor, "b 1 n k"]:
        """Return the guided layers at each token, concatenated: the last ones of `fused_layers`, one for each tap."""
        assert examples.layers is not None
        return rearrange(examples.guide(examples.layers)[:, -len(self.taps) :], "b l n c -> b 1 n (l c)")

    def predict(self, depth: int, places: Int[Tensor, " m"], predicted: Float[Tensor, "b 1 m c"]) -> Prediction:
        """Return logits of its own head; there is no feature to regress."""
        return Prediction(depth, places, logits=self.logits(predicted[:, 0], None))


@dataclass(frozen=True)
class PossConfig(EagleConfig):
    """Sizes of a PosS-n drafter: specialists for `depths` depths, n = `per_layer` each; the last covers the rest.

    ValueError for a value out of range.
    """

    kind: str = "poss"
    depths: int = 6
    per_layer: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.depths <= MAX_LAYERS or self.per_layer < 1:
            raise ValueError(f"depths {self.depths}, per_layer {self.per_layer}: wanted 1 to {MAX_LAYERS}, and above 0")
        if self.layers != 1:
            raise ValueError(f"layers is {self.layers}, wanted 1: a specialist is one decoder layer")

    @property
    def specialists(self) -> int:
        """Number of specialists."""
        return -(-self.depths // self.per_layer)


class Specialist(EagleLayer):
    """A decoder layer with its own projection of pairs."""

    is_packable = False

    def __init__(self, config: PossConfig, number: int) -> None:
        super().__init__(config, number)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=config.has_fc_bias)

    def write_keys(
        self, x: Float[Tensor, "b n c"], factors: Float[Tensor, "b n 3 1 half 2"], cache: Any, slots: Int[Tensor, "b n"]
    ) -> None:
        """Write keys and values for later passes, and compute nothing else."""
        attention = self.attention
        fresh = attention.project(x, x.shape[-1]).unflatten(-1, (2, attention.n_head, -1))
        cache.write(self.number, slots, rotate(fresh, factors[:, :, 1:]))


class Poss(Eagle):
    """PosS: position specialists, one layer for each depth of drafting or for each few depths (arXiv:2506.03566).

    EAGLE's single layer must handle true features and features that it drafted itself, which get worse with every
    depth. Here draft number i is made by specialist i // n ("PosS-n"), trained on features as inaccurate as in
    drafting. All specialists read the true features of committed tokens, so each has its own keys and values: a pass
    runs the specialist of its depth and computes only keys and values for the later ones. Embeddings and the encoding
    of guidance are shared, the head is the target's.
    """

    config: PossConfig
    detaches = True  # a specialist is trained on the earlier ones' outputs as they are

    def __init__(self, config: PossConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Specialist(config, i) for i in range(config.specialists))
        del self.fc

    @property
    def projections(self) -> list[nn.Linear]:
        """The projection of each specialist."""
        return [specialist.fc for specialist in self.layers]

    @property
    def least_depths(self) -> int:
        """Least number of depths in training that includes drafts of every specialist."""
        return (len(self.layers) - 1) * self.config.per_layer + 1

    def specialist_at(self, depth: int) -> int:
        """Return the number of the specialist for a pass after `depth` drafted features."""
        return min(depth // self.config.per_layer, len(self.layers) - 1)

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
        """Return the next features by the specialist of this depth; the later ones write keys and values only."""
        factors = self.rotary(positions)
        pairs = self.pair(features, tokens)
        own, *later = self.layers[self.specialist_at(depth) :]
        for specialist in later if cache is not None else ():
            specialist.write_keys(self.add_scale(specialist.fc(pairs), scales), factors, cache, slots)
        return own(self.add_scale(own.fc(pairs), scales), factors, mask=mask, cache=cache, slots=slots)
