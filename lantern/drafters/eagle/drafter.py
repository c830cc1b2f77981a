"""Drafting of static trees with an EAGLE-1 module or one derived from it."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.buffers import Buffers
from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Prompt, Scores, Step, Target
from lantern.decoding.cache import StaticCache
from lantern.drafters.base import PURPOSE_OF_MODE, check_draft, ranking
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.trees.static import Level, StaticTree, TreeDrafter


class EagleDrafter(TreeDrafter):
    """Drafts a static tree with an `Eagle` module and the target's head.

    Mode "gumbel" takes the top of log q + g with the target's noise; "sampled" samples without replacement with the
    drafter's own noise (the same top-K trick); "point" takes the most likely tokens. q uses the same `sampling` as the
    target's p; at temperature 0 tokens are ranked by their logits. Trees carry log q in mode "sampled", whose verifiers
    read it, and with `records_log_q`, for relaxations that read it. Nodes of a token number share their noise, in later
    steps too, unless the samples are `is_fresh`, which traversal verification needs.
    ValueError for a tree that is wider than the codebook and for a drafter of other sizes.
    """

    def __init__(
        self,
        module: Eagle,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
        is_fresh: bool = False,
    ) -> None:
        if module.config.dim != target.config.dim or module.config.block_size != target.config.block_size:
            got, expected = (module.config.dim, module.config.block_size), (target.config.dim, target.config.block_size)
            raise ValueError(
                f"the drafter has (dim, block_size) {got}, its target {expected}: use a drafter trained for it"
            )
        slots = max(target.config.cls_token_num - 1, 0) if module.config.form == "rows" else 0
        if module.config.cls_token_num != slots:
            got = module.config.cls_token_num
            raise ValueError(f"the drafter has {got} conditioning slots, wanted {slots} for this target")
        check_draft(mode, tree, target.config.vocab_size)
        self.module, self.target, self.tree = module, target, tree
        self.mode: DraftMode = mode
        self.records_log_q = records_log_q or mode == "sampled"
        self.sampling, self.is_fresh = sampling, is_fresh
        self.draft_sampling = ranking(sampling)
        self.rows = sampling.rows if module.config.form == "rows" else 1
        self.needs_whole_prefix = module.config.cls_token_num > 0
        self.taps = module.taps
        self.most_committed = 0  # tokens that a step may commit, if its tree is deeper than this drafter's
        self.held, self._has_begun, self._is_read = Buffers(), False, True

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt's features."""
        device = prompt.features.device
        self.noise, self.count, self._is_read = noise, self.module.config.block_size, True
        self._open(prompt)
        self.held.known = torch.zeros(len(prompt.mask), dtype=torch.long, device=device)
        self.shape, self.levels = self.tree.shape(device), self.tree.levels(device)
        self._log_q_rows = self.tree.log_q_rows(device)
        self._inner = self.tree.inner(device)

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
        config, device = self.module.config, prompt.features.device
        images, prefix, stage = len(prompt.mask), config.cls_token_num, self.stage
        self.cache = StaticCache.of(
            self.cache if self._has_begun else None,
            layers=self.module.num_caches,
            images=images,
            rows=self.rows,
            heads=config.n_head,
            head_dim=config.dim // config.n_head,
            prefix=prefix,
            tokens=self.count,
            stage=stage,
            dtype=self.module.cache_dtype,
            device=device,
        )
        sees = torch.ones_like(prompt.mask[:, :-1]) if config.sees_padding else prompt.mask[:, :-1]
        self._mask = self.cache.tree_mask(sees[:, :prefix], stage)
        self._has_begun = True
        self.held.stage = torch.arange(stage, device=device) + self.cache.first_stage_slot
        if prefix:
            self._read_prefix(prompt, sees)

    def _sees(self, places: Int[Tensor, "b n"], ancestors: Bool[Tensor, "*b n m"]) -> Tensor:
        """Return the mask of a pass over pairs at these places, which see `ancestors` among the staged pairs."""
        return self._mask.update(self.known, ancestors)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens, each with the target's feature that predicted it."""
        if not self._is_read:  # of given tokens there are several steps between proposals
            self._read_pending()
        self._is_read = False
        self._take(step.of_tokens(self._read_features(step.scores)), step.tokens, step.counts)

    def propose(self) -> DraftTree:
        """Grow the tree."""
        tokens, log_qs = self._grow()
        log_q = torch.cat(log_qs, 1)[:, self._log_q_rows] if self.records_log_q else None
        return DraftTree(torch.cat(tokens, 1), self.shape, self.mode, log_q, self._inner)

    def _grow(self) -> tuple[list[Int[Tensor, "b m"]], list[Float[Tensor, "b f v"]]]:
        """Return the tokens of every depth and log q below its inner nodes, with one pass per depth."""
        features = self._read_pending()
        tokens = [self.held.tokens.gather(1, self.held.last)]
        log_qs, sampler = list[Tensor](), self._sampler()
        ranker, purpose = self.target.ranker(self.draft_sampling, self.noise), PURPOSE_OF_MODE.get(self.mode)
        for depth, level in enumerate(self.levels):
            if depth > 0:
                features = self._extend(features[:, :, level.parents], tokens[-1][:, level.pairs], level, depth)
            places = self._followed(depth).expand(-1, features.shape[2])
            if sampler is not None:
                best = sampler(self._logits(features), places, width=level.width, purpose=purpose)
            elif ranker is not None:
                best, log_q = ranker(self._logits(features), places, width=level.width, purpose=purpose)
                log_qs.append(log_q)
            else:
                log_qs.append(self._log_q(features, depth))
                best = self._rank(log_qs[-1], level, depth)
            tokens.append(best.flatten(1)[:, level.picks])
        return tokens, log_qs

    def _sampler(self) -> Callable[..., Tensor] | None:
        """Return the function that samples children directly from logits, None where log q is needed."""
        if self.records_log_q or self.mode == "point":
            return None
        return self.target.sampler(self.draft_sampling, self.noise)

    def _followed(self, depth: int) -> Int[Tensor, "b 1"]:
        """Return the number of the token that follows nodes of a depth."""
        return (self.known[:, None] + depth).clamp(max=self.count - 1)

    def _read_features(self, predicted: Scores) -> Float[Tensor, "*rows n k"]:
        """Return what the module reads of a pass of the target."""
        features = predicted.fused if self.taps else predicted.features
        assert features is not None, "the pass did not record the inputs of the tapped layers"
        return features

    def _take(self, features: Float[Tensor, "b r m k"], tokens: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        """Keep pairs that the next proposal reads: pair `known + j` is (features j, token j)."""
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        self.held.places = (self.known[:, None] + ahead).clamp(max=self.count - 1)
        if self.module.config.form == "guided":
            features = self.sampling.guide(features, self.held.places)[:, None]
        entered = self.module.enter(features.flatten(0, 1).to(self.module.dtype))
        self.held.features = entered.unflatten(0, features.shape[:2])
        self.held.tokens, self.held.counts = tokens, counts
        self.held.last = (counts - 1).clamp(min=0)[:, None]

    def _read_pending(self) -> Float[Tensor, "b r 1 c"]:
        """Run the committed pairs, commit their keys, and return the feature that predicts the next token."""
        pairs = self.held.places.shape[1]
        causal = torch.ones(pairs, pairs, dtype=torch.bool, device=self.known.device).tril()
        features = self._run(self.held.features, self.held.tokens, self.held.places, causal)
        self.cache.commit(torch.arange(pairs, device=self.known.device).expand_as(self.held.places), self.known)
        self.known.add_(self.held.counts)
        self._is_read = True
        last = self.held.last[:, None, :, None].expand(-1, self.rows, -1, features.shape[-1])
        return features.gather(2, last)

    def _extend(
        self, features: Float[Tensor, "b r f c"], tokens: Int[Tensor, "b f"], level: Level, depth: int
    ) -> Float[Tensor, "b r f c"]:
        """Return features below the inner nodes of a depth, from their parents' features and their own tokens."""
        places = (self.known[:, None] + (depth - 1)).clamp(max=self.count - 1).expand_as(tokens)
        return self._run(features, tokens, places, level.ancestors, first=level.first, depth=depth)

    def _run(
        self,
        features: Float[Tensor, "b r n c"],
        tokens: Int[Tensor, "b n"],
        places: Int[Tensor, "b n"],
        ancestors: Bool[Tensor, "*b n m"],
        *,
        first: int = 0,
        depth: int = 0,
    ) -> Float[Tensor, "b r n c"]:
        """One pass over pairs staged from slot `first` on, each below `depth` pairs with drafted features or one."""
        images, rows, pairs, _ = features.shape
        slots = self.held.stage[first : first + pairs].expand(images * rows, -1)
        out = self.module(
            features.flatten(0, 1),
            tokens.repeat_interleave(rows, 0),
            (places + self.module.config.cls_token_num).repeat_interleave(rows, 0),
            self._sees(places, ancestors),
            scales=self.sampling.scales(places) if rows == 1 else None,
            cache=self.cache,
            slots=slots,
            depth=depth,
        )
        return out.unflatten(0, (images, rows))

    def _log_q(self, features: Float[Tensor, "b r f c"], depth: int) -> Float[Tensor, "b f v"]:
        """log q of what follows nodes of a depth."""
        logits = self._logits(features)
        if self.module.config.form == "guided":
            return self.draft_sampling.filtered(logits[:, 0])
        return self.draft_sampling.log_probs(logits, self._followed(depth).expand(-1, features.shape[2]))

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        return self.module.logits(features.flatten(0, 1), self.target).unflatten(0, features.shape[:2])

    def _rank(self, log_q: Float[Tensor, "b f v"], level: Level, depth: int) -> Int[Tensor, "b f k"]:
        """The children of each node in draw order."""
        if self.is_fresh:
            first = 0 if depth == 0 else 1 + level.first
            log_q = log_q + self.noise.fresh(
                self.known, torch.arange(first, first + log_q.shape[1], device=log_q.device)
            )
        elif self.mode != "point":
            log_q = log_q + self.noise.gumbel(self._followed(depth), PURPOSE_OF_MODE[self.mode])
        return log_q.topk(level.width, dim=-1).indices

    def _read_prefix(self, prompt: Prompt, sees: Bool[Tensor, "b t"]) -> None:
        """Fill the prompt's slots: each slot's feature is paired with the embedding of token 0."""
        features = prompt.features[:, :, :-1].to(self.module.dtype)
        images, rows, length, _ = features.shape
        slots = torch.arange(length, device=features.device).expand(images * rows, -1)
        mask = torch.zeros(images, length, self.cache.slots, dtype=torch.bool, device=features.device)
        mask[:, :, :length] = torch.tril(sees[:, None] | ~sees[:, :, None])
        self.module(
            features.flatten(0, 1),
            torch.zeros_like(slots),
            slots,
            mask.repeat_interleave(rows, 0),
            cache=self.cache,
            slots=slots,
        )
