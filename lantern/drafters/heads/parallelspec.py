"""ParallelSpec: mask tokens behind the last pair guess all tokens to come in one pass (arXiv:2410.05589).

An EAGLE module in the guided form. Its input is the committed pairs and, behind the last of them, one mask token per
further depth:

    pairs    (f0 x0) (f1 x1) (f2 x2)   masks   m2   m3   m4
    guess              x3 <- (f2 x2)           x4   x5   x6

A mask has the position of its token, one before the token that it predicts, and sees the committed pairs and the masks
before it. Guessed tokens are not read, so the guesses are independent of each other: a draft costs one pass, but later
guesses do not depend on earlier ones as they do in a chain of drafter passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Noise
from lantern.core.types import DraftPasses, DraftTree, Prompt, Step, Target
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads.marginals import MarginalDrafter
from lantern.drafters.trees.static import DepthPlan

MAX_DEPTHS = 64


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
    """The drafter's weights. The input of mask d is that of the last pair plus `masks[d]`."""

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
        self.passes = None
        if self.may_be_run(ParallelDrafter, ParallelSpec):
            outputs, order = torch.arange(self.depth), torch.nn.functional.pad(self.held.picks + 1, (1, 0))
            level = DepthPlan(self.tree.width, 0, order, outputs, outputs, torch.zeros(self.depth, 0, dtype=torch.bool))
            masks = self.module.masks[: self.depth - 1]
            self.passes = DraftPasses(self.module, self.cache, self.shape, (level,), order, self.held.depths, masks)

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
