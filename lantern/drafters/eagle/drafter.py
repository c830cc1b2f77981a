"""Drafting of static trees with an EAGLE-1 module or one derived from it."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftPasses, DraftTree, Prompt, Step, Target
from lantern.drafters.base import NetworkDrafter
from lantern.drafters.eagle.eagle1 import Eagle


class EagleDrafter(NetworkDrafter):
    """Drafts a static tree with an `Eagle` module; `how` are the tree, mode and sampling of `NetworkDrafter`.

    Nodes of a token number share their noise, in later steps too, unless the samples are `is_fresh`, which traversal
    verification needs. ValueError for a drafter with other conditioning slots.
    """

    cache: Any = None  # its memory serves the next generation of the same sizes

    def __init__(self, module: Eagle, target: Target, *, is_fresh: bool = False, **how: Any) -> None:
        super().__init__(module, target, **how)
        form, slots = module.config.form, module.config.cls_token_num
        wanted = max(target.config.cls_token_num - 1, 0) if form == "rows" else 0
        if slots != wanted:
            raise ValueError(f"the drafter has {slots} conditioning slots, wanted {wanted} for this target")
        self.rows, self.is_fresh, self.taps = self.sampling.rows if form == "rows" else 1, is_fresh, module.taps
        self.needs_whole_prefix = slots > 0
        self.most_committed = 0  # tokens that a step may commit, if its tree is deeper than this drafter's

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt's features."""
        super().begin(prompt, noise)
        device, self._is_read = prompt.mask.device, True
        self._open(prompt)
        ahead = torch.arange(max(self.stage, self.tree.depth + 1), device=device)
        self.held.ahead, self.held.causal = ahead, ahead[:, None] >= ahead
        self.held.stage = ahead[: self.stage] + self.cache.first_stage_slot
        self.held.known = torch.zeros(len(prompt.mask), dtype=torch.long, device=device)
        is_other = self.is_fresh or self.most_committed or self.module.config.form != "guided"
        is_run = not is_other and self.may_be_run(EagleDrafter, Eagle)
        plan = (self.shape, self.levels, self.order, self.log_q_rows)
        self.passes = DraftPasses(self.module, self.cache, *plan) if is_run else None

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of tokens of each image whose pairs were run."""
        return self.held.known

    @property
    def stage(self) -> int:
        """Largest number of pairs of a pass."""
        return max(self.tree.depth + 1, self.most_committed, self.tree.num_inner, 1)

    def _open(self, prompt: Prompt) -> None:
        """Create the cache and the mask, and read the prompt."""
        sees = self.module.sees(prompt.mask[:, :-1])[:, : self.module.config.cls_token_num]
        sizes = {"images": len(sees), "rows": self.rows, "prefix": sees.shape[1], "tokens": self.count}
        self.cache = self.module.new_cache(self.cache, **sizes, stage=self.stage, device=sees.device)
        self.cache.first.copy_(sees.sum(1).repeat_interleave(self.rows)[:, None])
        self._mask = self.cache.tree_mask(sees, self.stage)
        if sees.shape[1]:
            features = prompt.features[:, :, :-1].flatten(0, 1)
            self.module.read_prompt(features, sees.repeat_interleave(self.rows, 0), self.cache, self.cache.slots)

    def _sees(self, places: Int[Tensor, "b n"], ancestors: Bool[Tensor, "*b n m"]) -> Tensor:
        """Return the mask of a pass over pairs at these places, which see `ancestors` among the staged pairs."""
        return self._mask.update(self.known, ancestors)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens for the next proposal: pair `known + j` is (feature that predicted it, token j)."""
        if not self._is_read:  # of given tokens there are several steps between proposals
            self._read_pending()
        read = step.scores.fused if self.taps else step.scores.features
        assert read is not None, "the pass did not record the inputs of the tapped layers"
        self.held.hold(features=step.of_tokens(read), tokens=step.tokens, counts=step.counts)
        self._is_read = False

    def propose(self) -> DraftTree:
        """Grow the tree, with one pass per depth."""
        features, ranked, log_qs = self._read_pending(), [self._root], list[Tensor]()
        for depth, level in enumerate(self.levels):
            if depth > 0:
                inner, above = ranked[-1][:, level.pairs], features[:, :, level.parents]
                features = self._run(above, inner, level.ancestors, first=level.first, depth=depth)
            places = self._followed(depth)
            if self.is_fresh:
                first = 0 if depth == 0 else 1 + level.first
                nodes = torch.arange(first, first + features.shape[2], device=features.device)
                log_q = self.log_q(self._logits(features), places)
                best = (log_q + self.noise.fresh(self.known, nodes)).topk(level.width, dim=-1).indices
            else:
                best, log_q = self.children(self._logits(features), places, level.width)
            ranked.append(best.flatten(1))
            log_qs += [] if log_q is None else [log_q]
        return self.drafted(ranked, log_qs)

    @property
    def _root(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.held.tokens.gather(1, self._last)

    def _followed(self, depth: int) -> Int[Tensor, "b 1"]:
        """Return the number of the token that follows nodes of a depth."""
        return self._places[:, depth : depth + 1]

    def _read_pending(self) -> Float[Tensor, "b r 1 c"]:
        """Run the committed pairs, commit their keys, and return the feature that predicts the next token."""
        pairs, ahead, features = self.held.tokens.shape[1], self.held.ahead, self.held.features
        self._read_places = (self.known[:, None] + ahead[:pairs]).clamp(max=self.count - 1)
        if self.module.config.form == "guided":
            features = self.sampling.guide(features, self._read_places)[:, None]
        features = self._run(self.module.enter(features), self.held.tokens, self.held.causal[:pairs, :pairs])
        self.cache.commit(ahead[:pairs].expand_as(self._read_places), self.known)
        self.known.add_(self.held.counts)
        self._is_read, self._last = True, (self.held.counts - 1).clamp(min=0)[:, None]
        self._places = (self.known[:, None] + ahead[: self.tree.depth + 1]).clamp(max=self.count - 1)
        return features.gather(2, self._last[:, None, :, None].expand(*features.shape[:2], -1, features.shape[-1]))

    def _run(
        self,
        features: Float[Tensor, "b r n c"],
        tokens: Int[Tensor, "b n"],
        ancestors: Bool[Tensor, "*b n m"],
        *,
        first: int = 0,
        depth: int = 0,
    ) -> Float[Tensor, "b r n c"]:
        """One pass over drafted pairs of a depth, staged from slot `first` on; at depth 0 over the committed ones."""
        places = self._followed(depth - 1).expand_as(tokens) if depth else self._read_places
        return self.module.draft(
            *(features, tokens, places, self._sees),
            known=self.known,
            ancestors=ancestors,
            scales=self.scales(places) if features.shape[1] == 1 else None,
            cache=self.cache,
            slots=self.held.stage[first : first + features.shape[2]],
            depth=depth,
        )

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        return self.module.logits(features.flatten(0, 1), self.target).unflatten(0, features.shape[:2])
