"""ViSpec: an EAGLE drafter with a compressed context (arXiv:2509.15235), adapted to image generation.

One attention layer over many similar keys loses the few that matter. In the paper these keys are an image's tokens in a
prompt. In image generation they are the caption's slots and the finished rows:

    caption          learned queries attend to the caption's features: `summaries` tokens, and one global vector g that
                     is added, through a matrix that starts at zero, to every feature that the drafter reads
    finished rows    a row more than `recent` rows back is one token: the mean of its pairs with learned weights
    recent rows      not compressed, like the current row

Otherwise it is an EAGLE module in the guided form. Its single layer computes keys and values from its inputs, so the
tokens need no pass of their own.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.types import Prompt
from lantern.decoding.cache import StaticCache
from lantern.drafters.base import Examples
from lantern.drafters.eagle.drafter import EagleDrafter, GrowingDrafter
from lantern.drafters.eagle.networks import Eagle, EagleConfig, Unroll
from lantern.models.llamagen.transformer import rotate

MAX_LOG_WEIGHT = 20.0  # sums of weights are kept over all steps and must stay finite


@dataclass(frozen=True)
class ViSpecConfig(EagleConfig):
    """Sizes of a guided EAGLE module with one layer, and of its compressed context.

    `summaries` tokens represent the caption, `recent` finished rows are not compressed; `has_globe` enables g.
    ValueError for a value out of range.
    """

    kind: str = "vispec"
    summaries: int = 1
    recent: int = 2
    has_globe: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form != "guided" or self.layers != 1:
            raise ValueError(f'form is "{self.form}", layers {self.layers}: wanted "guided" and 1')
        if not 0 <= self.summaries <= 64 or not 1 <= self.recent <= self.block_size:
            got = (self.summaries, self.recent)
            raise ValueError(f"(summaries, recent) is {got}, wanted 0 to 64 and at least 1 row")

    @property
    def grid(self) -> int:
        """Rows of an image, and tokens per row."""
        return math.isqrt(self.block_size)


class CompressedUnroll(Unroll):
    """The cache of a training-time test whose pairs see their own and recent rows whole, and others as tokens.

    `context` are keys and values of the compressed context, a row's at its end; `globe` is the caption's vector.
    """

    def __init__(
        self, config: ViSpecConfig, context: Float[Tensor, "b s 2 h d"], globe: Float[Tensor, "b 1 c"]
    ) -> None:
        slots = torch.zeros(context.shape[:2], dtype=torch.long, device=context.device)
        super().__init__(slots == 0)
        self.config, self.size, self.globe = config, context.shape[1], globe
        self.write(0, slots, context)

    def next_mask(self, images: int, pairs: int, device: torch.device) -> Bool[Tensor, "b n s"]:
        """Start a pass; mask tokens of rows that a pair sees whole, and true pairs of rows that it sees as tokens."""
        mask, grid = super().next_mask(images, pairs, device), self.config.grid
        row = torch.arange(pairs, device=device) // grid
        oldest = row[:, None] - self.config.recent
        is_seen = torch.ones(pairs, mask.shape[2], dtype=torch.bool, device=device)
        is_seen[:, self.size - grid : self.size] = torch.arange(grid, device=device) < oldest
        is_seen[:, self.size : self.size + pairs] = row >= oldest
        return mask & is_seen


class ViSpec(Eagle):
    """The drafter's weights."""

    config: ViSpecConfig

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__(config)
        dim = config.dim
        self.queries = nn.Parameter(torch.zeros(config.summaries + 1, dim))
        self.caption_key, self.caption_value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.row_key, self.row_value = nn.Linear(dim, 1), nn.Linear(dim, dim)
        self.globe = nn.Linear(dim, dim, bias=False)

    @property
    def reads(self) -> frozenset[str]:
        """Extras of `Examples` that training needs: the caption's features."""
        return frozenset({"prompt"})

    def init_weights(self, embeddings: Float[Tensor, "v c"], generator: torch.Generator) -> None:
        """Start as an EAGLE module; a row's token is the mean of its pairs, and the global vector is zero."""
        super().init_weights(embeddings, generator)
        self.queries.data.normal_(0.0, 0.02, generator=generator)
        self.row_value.weight.data.copy_(torch.eye(self.config.dim))
        layers = (self.row_key, self.row_value, self.caption_value)
        for parameter in (self.row_key.weight, self.globe.weight, *(layer.bias for layer in layers)):
            parameter.data.zero_()

    def read_caption(
        self, slots: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]
    ) -> tuple[Float[Tensor, "b p c"], Float[Tensor, "b 1 c"]]:
        """Compress a caption's guided features to tokens and the global vector; slots outside `mask` are padding."""
        slots = slots.to(self.dtype)
        scores = self.queries @ self.caption_key(slots).transpose(1, 2) / slots.shape[-1] ** 0.5
        shares = scores.float().masked_fill(~mask[:, None], -torch.inf).softmax(-1).to(slots.dtype)
        tokens = shares @ self.caption_value(slots)
        globe = self.globe(tokens[:, -1:])
        return tokens[:, :-1], globe if self.config.has_globe else torch.zeros_like(globe)

    def row_weights(self, inputs: Float[Tensor, "b n c"]) -> Float[Tensor, "b n 1"]:
        """Return the positive fp32 weight of each pair in its row's token."""
        return self.row_key(inputs).float().clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()

    def row_tokens(self, sums: Float[Tensor, "b r c"], weights: Float[Tensor, "b r 1"]) -> Float[Tensor, "b r c"]:
        """Return a token per row from the sums of weighted inputs and of weights; undefined for an empty row."""
        return self.row_value((sums / weights.clamp(min=math.exp(-MAX_LOG_WEIGHT))).to(self.dtype))

    def context_keys(
        self, caption: Float[Tensor, "b p c"], rows: Float[Tensor, "b r c"]
    ) -> Float[Tensor, "b p+r 2 h d"]:
        """Return keys and values of the compressed context; a row is at its last token, the caption has no rotation."""
        grid, tokens = self.config.grid, torch.cat([caption, rows], 1)
        ends = torch.arange(rows.shape[1], device=rows.device) * grid + grid - 1
        places = torch.cat([ends.new_zeros(caption.shape[1]), ends]).expand(len(tokens), -1)
        layer = self.layers[0]
        fresh = layer.attention.wqkv(layer.attention_norm(tokens)).unflatten(-1, (3, layer.attention.n_head, -1))
        return rotate(fresh, self.rotary(places))[:, :, 1:]

    def unrolled(self, examples: Examples) -> CompressedUnroll:
        """Return the cache of a training-time test, with the compressed context."""
        assert examples.prompt is not None and examples.mask is not None
        guided, tokens = examples.guided, examples.tokens[:, :-1]
        # The slot that predicts token 0 is the caption's last.
        slots = torch.cat([examples.guide(examples.prompt), guided[:, :1]], 1)
        caption, globe = self.read_caption(slots, examples.mask)
        scales = examples.scales[:, None].expand(tokens.shape)
        inputs = self.join(guided[:, :-1].to(self.dtype) + globe, tokens, scales)
        weights = self.row_weights(inputs)
        # The last row lacks the last token's pair and is never seen.
        sums, weights = (
            nn.functional.pad(x, (0, 0, 0, 1)).unflatten(1, (self.config.grid, -1)).sum(2)
            for x in (weights * inputs, weights)
        )
        return CompressedUnroll(self.config, self.context_keys(caption, self.row_tokens(sums, weights)), globe)


class RingCache(StaticCache):
    """A cache of the last `tokens` tokens: token i is in slot i modulo `tokens`."""

    def commit(self, nodes: Int[Tensor, "b m"], start: Int[Tensor, " b"]) -> None:
        """Copy staged node `nodes[:, j]` to the slot of token `start + j`."""
        steps = torch.arange(nodes.shape[1], device=nodes.device)
        self.move(nodes, (start[:, None] + steps) % self.tokens)

    def held(self, known: Int[Tensor, " b"]) -> Int[Tensor, "b s"]:
        """Return the token in each slot when tokens up to `known` are committed, below 0 where there is none."""
        slots = torch.arange(self.tokens, device=known.device)
        return known[:, None] - 1 - (known[:, None] - 1 - slots) % self.tokens


class ViSpecDrafter(EagleDrafter):
    """Drafts EAGLE's trees with a `ViSpec` module.

    It keeps keys of the caption's tokens, of one token per row, and, in a ring, of the tokens of `recent` rows and the
    current row. EAGLE keeps one per token.
    """

    module: ViSpec
    cache: RingCache

    def _open(self, prompt: Prompt) -> None:
        """Create the cache and compress the caption."""
        config, device, images = self.module.config, prompt.mask.device, len(prompt.mask)
        # A pass must not overwrite a slot that a pair in the oldest current row still sees.
        ring = min((config.recent + 1) * config.grid, config.block_size) + self.stage
        sizes = {"images": images, "rows": 1, "prefix": config.summaries + config.grid, "tokens": ring}
        earlier = self.cache
        self.cache = self.module.new_cache(earlier, RingCache, **sizes, stage=self.stage, device=device)
        places = torch.zeros(prompt.mask.shape, dtype=torch.long, device=device)
        guided = self.sampling.guide(prompt.features, places)
        self.held.caption, self.held.globe = self.module.read_caption(guided, prompt.mask)
        # Pairs that were not committed go to one row past the image.
        self.held.sums = torch.zeros(images, config.grid + 1, config.dim, dtype=torch.float32, device=device)
        self.held.weights = torch.zeros(images, config.grid + 1, 1, dtype=torch.float32, device=device)
        self.held.grid = torch.arange(config.grid, device=device)

    def _run(
        self, features: Float[Tensor, "b r n c"], tokens: Tensor, ancestors: Tensor, **at: int
    ) -> Float[Tensor, "b r n c"]:
        """Run a pass over pairs after adding the caption's vector to their features."""
        features = features + self.held.globe[:, None]
        if not at:  # the committed pairs
            self._read_rows(features[:, 0], tokens)
        return super()._run(features, tokens, ancestors, **at)

    def _sees(self, places: Int[Tensor, "b n"], ancestors: Bool[Tensor, "*b n m"]) -> Bool[Tensor, "b n s"]:
        """Return the mask: all of the caption, tokens of old rows, tokens of recent rows, and staged ancestors."""
        grid, (images, pairs) = self.module.config.grid, places.shape
        oldest = (places // grid - self.module.config.recent)[..., None]
        held = self.cache.held(self.known)[:, None]
        staged = torch.nn.functional.pad(ancestors, (0, self.cache.stage - ancestors.shape[-1]))
        caption = torch.ones(images, pairs, self.module.config.summaries, dtype=torch.bool, device=places.device)
        seen = (held >= 0) & (held // grid >= oldest)
        return torch.cat([caption, self.held.grid < oldest, seen, staged.expand(images, pairs, -1)], -1)

    def _read_rows(self, features: Float[Tensor, "b m c"], tokens: Int[Tensor, "b m"]) -> None:
        """Add the committed pairs to their rows and update the keys of all rows."""
        module, grid = self.module, self.module.config.grid
        inputs = module.join(features, tokens, self.scales(self._read_places))
        weights = module.row_weights(inputs)
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        rows = torch.where(steps < self.held.counts[:, None], self._read_places // grid, grid)[..., None]
        self.held.weights.scatter_add_(1, rows, weights)
        self.held.sums.scatter_add_(1, rows.expand(-1, -1, inputs.shape[-1]), weights * inputs.float())
        summaries = module.row_tokens(self.held.sums[:, :-1], self.held.weights[:, :-1])
        keys = module.context_keys(self.held.caption, summaries)
        self.cache.write(0, torch.arange(self.cache.prefix, device=keys.device)[None], keys)


class GrowingViSpecDrafter(ViSpecDrafter, GrowingDrafter):
    """Drafts EAGLE-2's trees with a `ViSpec` module."""
