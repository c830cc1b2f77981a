"""Drafters that guess several tokens in one pass: Medusa heads, vertical heads, ParallelSpec.

Trees are of independent marginals: all nodes of one depth share a distribution (arXiv:2401.10774).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Noise
from lantern.core.types import DraftPlan, DraftTree, ImageMemory, Prompt, Step, Target
from lantern.drafters.base import Examples, NetworkDrafter, Prediction, Trainee, target_logits, token_embeddings
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.drafters.trees import DepthPlan
from lantern.models.llamagen.transformer import TransformerConfig, check_grid, check_limits

MAX_DEPTHS = 64


class MarginalDrafter(NetworkDrafter):
    """Drafts a static tree over independent marginals: q_d is the distribution of the d-th token to come.

    q_d does not depend on the tokens before, so the k-th child of every node of a depth is the same token, the k-th
    best of log q_d + g, and a tree costs one top-k over a matrix. In mode "sampled" there is one set of samples per
    depth, independent of the depths above.

    The config of `module` also has the number of `depths` that it guesses at once. Subclasses define `propose`, and
    `begin` and `observe` if they keep more than the last pairs. ValueError for a tree that is deeper than its guesses.
    """

    def __init__(self, module: Any, target: Target, **how: Any) -> None:
        super().__init__(module, target, **how)
        if self.depth > module.config.depths:
            raise ValueError(
                f"the tree is {self.depth} deep and the drafter guesses {module.config.depths} tokens:"
                " use a shallower one"
            )

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create the constants of the tree."""
        super().begin(prompt, noise)
        self.held.steps_ahead = torch.arange(self.depth, device=prompt.mask.device)
        self.held.picks = ((self.shape.depths - 1) * self.tree.width + self.shape.ranks)[1:]
        self.held.depths = self.shape.depths.clamp(max=self.depth - 1)

    def observe(self, step: Step) -> None:
        """Keep the m committed pairs (feature that predicted a token, token) of each image; the first `counts` count.

        Features are guidance-combined, F* = f_u + s (f_c - f_u). `start` is the number of the first token, `places` are
        those of all, clamped to the image; `last` is the index of the last pair, arbitrary in finished images.
        """
        ahead = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        self.held.assign(start=step.start, counts=step.counts, tokens=step.tokens)
        self.held.places = (step.start[:, None] + ahead).clamp(max=self.count - 1)
        self.held.features = self.sampling.guide(step.of_tokens(step.scores.features), self.held.places)
        self.held.last = (step.counts - 1).clamp(min=0)[:, None]

    @property
    def root(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.held.tokens.gather(1, self.held.last)

    def places(self) -> Int[Tensor, "b d"]:
        """Return the numbers of the tokens to come, one per depth."""
        known = self.held.start + self.held.counts
        return (known[:, None] + self.held.steps_ahead).clamp(max=self.count - 1)

    def draft(self, features: Float[Tensor, "b d c"]) -> DraftTree:
        """Return the tree below the last committed token, from guided features that predict the tokens to come."""
        logits = target_logits(self.target, features)[:, None]
        return self.grow(*self.children(logits, self.places(), self.tree.width))

    def grow(self, best: Int[Tensor, "b d k"], log_q: Float[Tensor, "b d v"] | None) -> DraftTree:
        """Return the tree below the last committed token, from the best tokens of each depth and their log q."""
        tokens = torch.cat([self.root, best.flatten(1)[:, self.held.picks]], 1)
        recorded = log_q[:, self.held.depths] if self.records_log_q and log_q is not None else None
        return DraftTree(tokens, self.shape, self.mode, recorded, self.inner_nodes)


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of `depths` heads for the tokens ahead. With `reads_token` they read the last token and the feature before
    it.

    `target` is the digest of the weights for which they were trained, None if unknown. ValueError for a value out of
    range.
    """

    dim: int
    vocab_size: int
    block_size: int
    depths: int = 4
    reads_token: bool = True
    kind: str = "medusa"
    target: str | None = None

    def __post_init__(self) -> None:
        if self.kind != type(self).kind:
            raise ValueError(f'kind is "{self.kind}", wanted "{type(self).kind}"')
        if not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}")
        check_limits(self, "dim", "vocab_size", "block_size")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> Self:
        """Return a config with its target's width."""
        fields: dict[str, Any] = {"dim": config.dim, "vocab_size": config.vocab_size, "block_size": config.block_size}
        return cls(**(fields | changes))


class FeatureHeads(nn.Module):
    """`count` residual heads as one matrix; at the start each returns its input.

    With `vocab_size` they also read the embedding of the token that followed (as Hydra's first head does,
    arXiv:2402.05109); without it they read the feature alone. `guidance` times log s encodes the guidance scale of f.
    """

    def __init__(self, dim: int, count: int, *, vocab_size: int | None) -> None:
        super().__init__()
        self.count = count
        self.embed_tokens = None if vocab_size is None else nn.Embedding(vocab_size, dim)
        self.fc = nn.Linear(dim if vocab_size is None else 2 * dim, count * dim)
        self.guidance = nn.Parameter(torch.zeros(count * dim))

    def init_weights(self, embeddings: Float[Tensor, "v c"]) -> None:
        """Set heads that return their input, and copy the target's embeddings."""
        for parameter in (self.fc.weight, self.fc.bias, self.guidance):
            parameter.data.zero_()
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(embeddings)

    def forward(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"]
    ) -> Float[Tensor, "b n h c"]:
        """Return for each head the feature that it estimates; `scales` is the guidance scale at each given feature."""
        base = features.to(self.fc.weight.dtype)
        read = base if self.embed_tokens is None else torch.cat([self.embed_tokens(tokens), base], -1)
        change = self.fc(read) + (scales.log()[..., None] * self.guidance).to(base.dtype)
        return base[:, :, None] + nn.functional.silu(change).unflatten(-1, (self.count, -1))


class Medusa(Trainee):
    """Medusa heads: the d-th token to come is guessed from the last feature alone (arXiv:2401.10774; VADUSA, speech).

    There is one head for each of the `depths` tokens ahead, then `extra_heads` others. Each is residual, f + silu(W_d
    f), and returns a guidance-combined feature, which the target's head maps to a distribution. There is no context and
    no cache, and a step costs one matrix product: this is the cheapest trained drafter.
    """

    config: MedusaConfig
    extra_heads: ClassVar[int] = 0

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        count, vocab_size = config.depths + self.extra_heads, config.vocab_size if config.reads_token else None
        self.heads = FeatureHeads(config.dim, count, vocab_size=vocab_size)

    @property
    def least_depths(self) -> int:
        """The number of heads: each learns one depth."""
        return self.config.depths

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Start every head at "the predicted feature equals this one"."""
        self.heads.init_weights(token_embeddings(target, self.config.vocab_size))

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return the heads' predictions at every token."""
        tokens = examples.tokens
        predicted = self.heads(examples.guided, tokens, examples.scales[:, None].expand(tokens.shape))
        return [
            Prediction(depth, torch.arange(reach, tokens.shape[1], device=tokens.device), predicted[:, :-reach, head])
            for depth, reach, head in self.targets(min(depths, self.config.depths, tokens.shape[1] - 1))
        ]

    def targets(self, levels: int) -> list[tuple[int, int, int]]:
        """Return (depth, tokens ahead, number of the head) of what is trained on so many depths."""
        return [(depth, depth, depth - 1) for depth in range(1, levels + 1)]


class MedusaDrafter(MarginalDrafter):
    """Drafts trees from the heads' independent guesses."""

    def propose(self) -> DraftTree:
        """Run the heads and the target's head over `depth` features, and return the tree."""
        last = self.held.last
        feature = self.held.features.take_along_dim(last[..., None], 1)
        scales = self.scales(self.held.places.gather(1, last))
        return self.draft(self.module.heads(feature, self.root, scales)[:, 0, : self.depth])


@dataclass(frozen=True)
class VerticalConfig(MedusaConfig):
    """Sizes: `depths` horizontal heads, and one for the token below."""

    kind: str = "vertical"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grid(self.block_size)

    @property
    def grid(self) -> int:
        """Tokens per row."""
        return math.isqrt(self.block_size)


class Vertical(Medusa):
    """Vertical heads: every committed token also predicts the token below it, kept in a pool (Hawk, NeurIPS 2025).

    The last head is the vertical one; the others guess the next tokens of the row as Medusa's do. When decoding reaches
    the row below, its places hold guesses made one row earlier. The distributions of both are mixed there, and the tree
    takes the best tokens of the mixture. The target still decides in raster order, so the pool does not affect
    exactness.
    """

    config: VerticalConfig
    extra_heads = 1

    def targets(self, levels: int) -> list[tuple[int, int, int]]:
        """Return the horizontal heads' targets, and as one more depth the vertical head's: the token below."""
        return [*super().targets(levels), (levels + 1, self.config.grid, -1)]


class VerticalDrafter(MarginalDrafter):
    """Drafts trees from (1 - share) q_horizontal + share q_vertical, the latter where the pool has a guess.

    The pool holds a feature for each place of the image, guessed when the token above it was committed.
    """

    def __init__(self, module: Vertical, target: Target, *, share: float = 0.25, **common: Any) -> None:
        super().__init__(module, target, **common)
        self.share = share

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Empty the pool."""
        super().begin(prompt, noise)
        config, device, images = self.module.config, prompt.mask.device, len(prompt.mask)
        # Predictions of tokens that were not committed, or below the last row, go to one place past the image.
        dtype = self.module.heads.fc.weight.dtype
        self.held.pool = torch.zeros(images, config.block_size + 1, config.dim, dtype=dtype, device=device)
        self.held.is_filled = torch.zeros(images, config.block_size + 1, dtype=torch.bool, device=device)

    def propose(self) -> DraftTree:
        """Run the target's head over the last horizontal guesses and the pool's guesses for the same places."""
        places = self.places()
        vertical = self.held.pool.take_along_dim(places[..., None], 1)
        both = target_logits(self.target, torch.cat([self.held.ahead, vertical], 1))
        horizontal, vertical = self.draft_sampling.filtered(both).chunk(2, dim=1)
        share = self.held.is_filled.gather(1, places)[..., None].float() * self.share
        log_q = torch.logaddexp(horizontal + torch.log1p(-share), vertical + share.log())
        return self.grow(self.scores(log_q, places).topk(self.tree.width, dim=-1).indices, log_q)

    def observe(self, step: Step) -> None:
        """Run all heads on the committed tokens and put the vertical guesses into the pool."""
        super().observe(step)
        predicted = self.module.heads(self.held.features, self.held.tokens, self.scales(self.held.places))
        outside, steps = self.held.pool.shape[1], torch.arange(step.tokens.shape[1], device=step.tokens.device)
        below = self.held.places + self.module.config.grid
        below = torch.where(steps < step.counts[:, None], below, outside).clamp(max=outside - 1)
        self.held.pool.scatter_(1, below[..., None].expand(-1, -1, predicted.shape[-1]), predicted[:, :, -1])
        self.held.is_filled.scatter_(1, below, True)
        self.held.ahead = predicted.take_along_dim(self.held.last[..., None, None], 1)[:, 0, : self.depth]


@dataclass(frozen=True)
class ParallelSpecConfig(EagleConfig):
    """Sizes of a guided EAGLE module with `depths` guesses per step, and so `depths` - 1 masks.

    `anchors` is the number of tokens of an image behind which a training step guesses, chosen anew in every step.
    ValueError for a value out of range.
    """

    kind: str = "parallelspec"
    layers: int = 2
    depths: int = 8
    anchors: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form != "guided":
            raise ValueError(f'form is "{self.form}", wanted "guided": a parallel drafter reads one row')
        if not 1 <= self.depths <= MAX_DEPTHS or self.anchors < 1:
            raise ValueError(
                f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}, and anchors {self.anchors}, from 1"
            )


class ParallelSpec(Eagle):
    """ParallelSpec: mask tokens behind the last pair guess all tokens to come in one pass (arXiv:2410.05589).

    An EAGLE module in the guided form. Its input is the committed pairs and, behind the last of them, one mask token
    per further depth, whose input is that of the last pair plus `masks[d]`:

        pairs    (f0 x0) (f1 x1) (f2 x2)   masks   m2   m3   m4
        guess              x3 <- (f2 x2)           x4   x5   x6

    A mask has the position of its token, one before the token that it predicts, and sees the committed pairs and the
    masks before it. Guessed tokens are not read, so the guesses are independent of each other: a draft costs one pass,
    but later guesses do not depend on earlier ones as they do in a chain of drafter passes.
    """

    config: ParallelSpecConfig

    def __init__(self, config: ParallelSpecConfig) -> None:
        super().__init__(config)
        self.masks = nn.Parameter(torch.zeros(config.depths - 1, config.dim))

    @property
    def least_depths(self) -> int:
        """The number of guesses: each learns one depth."""
        return self.config.depths

    def init_weights(self, embeddings: Float[Tensor, "v c"], generator: torch.Generator) -> None:
        """Start as an EAGLE module does: every predicted feature equals the input feature."""
        super().init_weights(embeddings, generator)
        self.masks.data.normal_(0.0, 0.02, generator=generator)

    def guess(
        self,
        features: Float[Tensor, "b m c"],
        tokens: Int[Tensor, "b m"],
        positions: Int[Tensor, "b n"],
        anchors: Int[Tensor, "b a"],
        mask: Float[Tensor, "b n s"] | Bool[Tensor, "b n s"],
        *,
        scales: Float[Tensor, "b m"],
        cache: Any = None,
        slots: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Run one pass over m pairs and the masks behind the pairs numbered `anchors`, group after group.

        `positions` and `mask` cover the pairs, then the masks, of which each anchor has (n - m) / a. Output j of the
        pairs predicts token j + 1; mask d behind anchor i predicts token i + d.
        """
        pairs = self.join(features, tokens, scales)
        masks = (positions.shape[1] - tokens.shape[1]) // anchors.shape[1]
        behind = pairs.take_along_dim(anchors[..., None], 1)
        groups = (behind[:, :, None] + self.masks[:masks].to(pairs.dtype)).flatten(1, 2)
        x, factors = torch.cat([pairs, groups], 1), self.rotary(positions)
        for layer in self.layers:
            x = layer(x, factors, mask, cache=cache, slots=slots)
        return x

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return guesses behind all tokens at depth 1, and behind random anchors at the other depths.

        One pass holds all groups of masks; each group sees the pairs up to its anchor and itself.
        """
        tokens, pairs = examples.tokens, examples.tokens.shape[1] - 1
        depths = min(depths, self.config.depths, pairs)
        anchors = self._choose_anchors(pairs, tokens.device)
        after = torch.arange(1, depths, device=tokens.device)
        there = torch.arange(pairs, device=tokens.device)
        places = torch.cat([there, (anchors[:, None] + after).clamp(max=pairs - 1).flatten()])
        out = self.guess(
            examples.guided[:, :-1],
            tokens[:, :-1],
            places.expand(len(tokens), -1),
            anchors.expand(len(tokens), -1),
            group_mask(pairs, anchors, depths - 1).expand(len(tokens), -1, -1),
            scales=examples.scales[:, None].expand(-1, pairs),
        )
        made = [Prediction(1, there + 1, out[:, :pairs])]
        groups = out[:, pairs:].unflatten(1, (len(anchors), -1)) if depths > 1 else out
        for depth in range(2, depths + 1):
            is_inside = anchors + depth <= pairs
            made.append(Prediction(depth, anchors[is_inside] + depth, groups[:, is_inside, depth - 2]))
        return made

    def _choose_anchors(self, pairs: int, device: torch.device) -> Int[Tensor, " a"]:
        """Return tokens in raster order, random in training. Token 0 is one of them, so every depth has an anchor."""
        count = min(self.config.anchors, pairs)
        if self.training:
            others = torch.randperm(pairs - 1, device=device)[: count - 1] + 1
            return torch.cat([others.new_zeros(1), others.sort().values])
        return torch.arange(count, device=device) * pairs // count


def group_mask(pairs: int, anchors: Int[Tensor, " a"], masks: int) -> Bool[Tensor, "n n"]:
    """Return the attention mask of a pass over pairs and a group of masks behind each anchor.

    Three pairs, groups of two behind pairs 0 and 1:

        pair 0   1 . . | . . | . .
        pair 1   1 1 . | . . | . .
        pair 2   1 1 1 | . . | . .
        m2 of 0  1 . . | 1 . | . .
        m3 of 0  1 . . | 1 1 | . .
        m2 of 1  1 1 . | . . | 1 .
        m3 of 1  1 1 . | . . | 1 1
    """
    there = torch.arange(pairs, device=anchors.device)
    top = torch.nn.functional.pad(there <= there[:, None], (0, len(anchors) * masks))
    sees = (there <= anchors[:, None]).repeat_interleave(masks, 0, output_size=len(anchors) * masks)
    own = torch.ones(masks, masks, dtype=torch.bool, device=anchors.device).tril()
    groups = torch.kron(torch.eye(len(anchors), dtype=torch.bool, device=anchors.device), own)
    return torch.cat([top, torch.cat([sees, groups], 1)])


class ParallelDrafter(MarginalDrafter):
    """Drafts trees from a `ParallelSpec` module's independent guesses, with one pass per step."""

    cache: Any = None  # its memory serves the next generation of the same sizes

    def __init__(self, module: ParallelSpec, target: Target, **common: Any) -> None:
        super().__init__(module, target, **common)
        # the pairs of a step, and a mask for each depth but the first
        self.stage = 2 * self.depth

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Create an empty cache."""
        super().begin(prompt, noise)
        device, images, self._is_read = prompt.mask.device, len(prompt.mask), True
        sizes = {"images": images, "rows": 1, "prefix": 0, "tokens": self.count, "stage": self.stage}
        self.cache = self.module.new_cache(self.cache, **sizes, device=device)
        self._mask = self.cache.tree_mask(torch.zeros(images, 0, dtype=torch.bool, device=device), self.stage)
        self.held.steps = torch.arange(self.stage, device=device)
        self.plan = None
        if self.may_be_run(ParallelDrafter, ParallelSpec):
            outputs, order = torch.arange(self.depth), torch.nn.functional.pad(self.held.picks + 1, (1, 0))
            level = DepthPlan(self.tree.width, 0, order, outputs, outputs, torch.zeros(self.depth, 0, dtype=torch.bool))
            masks = self.module.masks[: self.depth - 1]
            self.plan = DraftPlan(self.module, self.cache, self.shape, (level,), order, self.held.depths, masks)

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """Its tensors, keys and values."""
        return self.held, self.cache

    def observe(self, step: Step) -> None:
        """Keep the pairs of a step, which the next pass runs; of given tokens there are several steps before it."""
        if not self._is_read:
            self.guess()
        self._is_read = False
        super().observe(step)

    def propose(self) -> DraftTree:
        """Run one pass and the target's head over `depth` features, and return the tree."""
        guesses, self._is_read = self.guess(), True
        return self.draft(guesses)

    def guess(self) -> Float[Tensor, "b d c"]:
        """Return features that predict the tokens behind the last committed pair; write all pairs to the cache."""
        tokens, anchor, known = self.held.tokens, self.held.last, self.held.start
        images, count = tokens.shape
        size = count + self.depth - 1
        steps = self.held.steps[:size]
        ahead = anchor + (steps[count:] - count + 1)
        places = known[:, None] + torch.cat([steps[:count].expand(images, -1), ahead], 1)
        # A pair sees the pairs before it; a mask sees the pairs up to the anchor and the masks before it.
        limit = torch.cat([steps[:count].expand(images, -1), anchor.expand(-1, self.depth - 1)], 1)
        is_mask = steps >= count
        sees = (steps <= limit[..., None]) | (is_mask & is_mask[:, None] & (steps <= steps[:, None]))
        out = self.module.guess(
            self.held.features.to(self.module.dtype),
            tokens,
            places.clamp(max=self.cache.tokens - 1),
            anchor,
            self._mask.update(known, sees),
            scales=self.scales(self.held.places),
            cache=self.cache,
            slots=(steps + self.cache.first_stage_slot).expand(images, -1),
        )
        self.cache.commit(steps[:count].expand(images, -1), known)
        index = torch.cat([anchor, steps[count:].expand(images, -1)], 1)
        return out.take_along_dim(index[..., None], 1)
