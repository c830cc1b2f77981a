"""Drafting with an EAGLE-1 module or one derived from it.

Trees are static, or grown depth by depth where a policy estimates the highest probabilities. FR-Spec drafts both with a
head over frequent tokens.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Noise
from lantern.core.types import DraftPlan, DraftTree, ImageMemory, Prompt, Step, Target, Traits, rows_at
from lantern.decoding.statistics import Readback
from lantern.drafters.base import NetworkDrafter
from lantern.drafters.eagle.networks import Eagle
from lantern.drafters.policies import (
    MAX_DEPTH,
    MAX_LOG,
    MIN_LOG,
    PRIOR,
    STOPPED,
    Layer,
    Policy,
    Pool,
    neighbours,
    padded_beam,
    traits_of,
    updated_map,
)
from lantern.drafters.trees import Candidates, Frontier, from_widths, grown, shape_of
from lantern.models.llamagen.transformer import check_limits

SPAN = 1 << 16  # a depth and a number of nodes are sent to the host as one number
STRIDE = 4  # sizes of trees are multiples of this, so that few sizes are compiled
ABSENT = -1e30  # logit of tokens outside of S: finite, since the difference of two guidance rows must not be NaN


class EagleDrafter(NetworkDrafter):
    """Drafts a static tree with an `Eagle` module; `how` are the tree, mode and sampling of `NetworkDrafter`.

    A token number has the same noise at all nodes and steps, unless the noise `is_fresh`, as traversal needs.
    ValueError for a drafter with other conditioning slots.
    """

    cache: Any = None  # its memory serves the next generation of the same sizes

    def __init__(self, module: Eagle, target: Target, *, is_fresh: bool = False, **how: Any) -> None:
        super().__init__(module, target, **how)
        form, slots = module.config.form, module.config.cls_token_num
        wanted = max(target.config.cls_token_num - 1, 0) if form == "rows" else 0
        if slots != wanted:
            raise ValueError(f"the drafter has {slots} conditioning slots, wanted {wanted} for this target")
        self.rows, self.is_fresh, self.taps = self.sampling.rows if form == "rows" else 1, is_fresh, module.taps
        self.needs_whole_prefix = "prompt" in module.reads
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
        parts = (self.module, self.cache, self.shape, self.levels, self.order, self.log_q_rows)
        self.plan = DraftPlan(*parts) if is_run else None

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """Its tensors, keys and values."""
        return self.held, self.cache

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
        read = step.scores.tapped if self.taps else step.scores.features
        assert read is not None, "the pass did not record the inputs of the tapped layers"
        self.held.assign(features=step.of_tokens(read), tokens=step.tokens, counts=step.counts)
        self._is_read = False

    def propose(self) -> DraftTree:
        """Grow the tree, with one pass per depth."""
        features, ranked, log_qs = self._read_pending(), [self._root], list[Tensor]()
        noise = None
        if self.is_fresh:
            nodes = torch.arange(1 + sum(len(level.parents) for level in self.levels[1:]), device=features.device)
            noise = self.noise.fresh(self.known, nodes)
        for depth, level in enumerate(self.levels):
            if depth > 0:
                inner, above = ranked[-1][:, level.pairs], features[:, :, level.parents]
                features = self._run(above, inner, level.ancestors, first=level.first, depth=depth)
            places = self._followed(depth)
            if noise is not None:
                first = 0 if depth == 0 else 1 + level.first
                log_q = self.log_q(self._logits(features), places)
                best = (log_q + noise[:, first : first + features.shape[2]]).topk(level.width, dim=-1).indices
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


@dataclass(frozen=True)
class Growth:
    """Largest size of trees: `nodes` drafted nodes, `width` extended nodes per depth with `width` children, `depth`.

    `spread` is how far the target's scores scatter around the drafter's (`match_chances`). With `adaptive` a policy
    whose `sizes_vary` chooses the size of the next tree, which the host reads a step later. ValueError for
    invalid sizes.
    """

    nodes: int = 15
    width: int = 8
    depth: int = 6
    spread: float = 1.25
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.width < 1 or not 1 <= self.depth <= MAX_DEPTH or self.spread <= 0:
            raise ValueError(
                f"nodes {self.nodes}, width {self.width}, depth {self.depth}, spread {self.spread}: wanted at least "
                f"one node, a width from 1, a depth from 1 to {MAX_DEPTH} and a spread above 0"
            )


class GrowingDrafter(EagleDrafter):
    """Drafts trees whose shape a policy chooses for each image and step.

    At each depth the policy gives every candidate, `width` children of `width` nodes, its log probability given the
    parent. The best candidates are extended, and the best of all are verified. In mode "sampled" no sampled token may
    be dropped, so the number of nodes of each depth is fixed, and their parents are chosen before they are sampled.
    ValueError for a policy that reads sampled tokens in that mode.
    """

    def __init__(self, module: Eagle, target: Target, *, policy: Policy, growth: Growth, **how: Any) -> None:
        width = min(growth.width, target.config.vocab_size)
        # a tree has no more depths than nodes
        self.growth = growth = dataclasses.replace(growth, width=width, depth=min(growth.depth, growth.nodes))
        super().__init__(module, target, tree=from_widths((width,) * growth.depth), **how)
        if self.mode == "sampled" and not policy.is_predictable:
            raise ValueError(
                f"{type(policy).__name__} chooses the tested tokens after they are sampled, which rejection does not "
                'allow: use verifier "gumbel"'
            )
        self.policy, self.records_traits = policy, False
        self.sizes = None
        if self.mode == "sampled":  # nodes of each depth: those of the best static tree
            counts = Counter(len(choice) for choice in grown(growth.nodes, growth.depth).choices)
            self.sizes = [min(counts[depth], width if depth == 1 else width * width) for depth in sorted(counts)]

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree, the root included."""
        return 1 + (self.growth.nodes if self.sizes is None else sum(self.sizes))

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return self.growth.depth if self.sizes is None else len(self.sizes)

    @property
    def needs_host(self) -> bool:
        """Whether the host reads the last step to choose the next tree's size, which CUDA graphs do not allow."""
        return self.growth.adaptive and self.policy.sizes_vary

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt and reset the policy."""
        super().begin(prompt, noise)
        images, device = len(prompt.mask), prompt.features.device
        self.side = round(self.count**0.5)
        width, front = self.growth.width, 1
        self.held.children = torch.arange(width**2, device=device)
        # Among equals the earlier sibling: rejection tests samples in order and skips none.
        self.held.elder = self.held.children % width * MAX_LOG
        self.held.stopped = torch.tensor(STOPPED, device=device)
        self.held.limits = torch.tensor([torch.finfo(torch.float32).min, torch.inf], device=device)
        self.held.identity = torch.eye(width, dtype=torch.bool, device=device)
        # of candidates: their depth, and where their parents' frontier starts; of inner nodes: where their depth starts
        depths, starts, firsts, above = [0], [0], [0], 0
        for depth in range(self.depth):
            count = front * width if self.sizes is None else min(self.sizes[depth], front * width)
            firsts += [len(depths)] * min(width, count)
            depths += [depth + 1] * count
            starts += [above] * count
            above, front = above + front, min(width, count)
        numbers = {"depths": depths, "starts": starts, "firsts": firsts}
        self.held.assign(**{name: torch.tensor(each, device=device) for name, each in numbers.items()})
        self.held.seen = torch.full((images, self.count + 1), PRIOR, dtype=torch.float32, device=device)
        self.policy.begin(images, device)
        self._size, self._wanted, self._readback = (self.growth.nodes, self.depth), None, Readback(device)

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """Its tensors, keys and values, and what the policy keeps."""
        return *super().memory, self.policy.held

    def observe(self, step: Step) -> None:
        """Keep the committed tokens, and update the policy with what was accepted."""
        super().observe(step)
        if step.verdict is None:  # given tokens
            return
        self.policy.observe(step)
        if self._reads_traits:
            self.held.seen = updated_map(self.held.seen, step, self.side)

    @property
    def _reads_traits(self) -> bool:
        return self.policy.reads_traits or self.records_traits

    def propose(self) -> DraftTree:
        """Grow the trees, with one pass of the drafter per depth."""
        nodes, passes = self._next_size()
        features = self._read_pending()
        root, zeros = self._root, torch.zeros_like(self._root)
        certain = zeros.float()
        parts = [Candidates(root, zeros, certain)]
        inside = self.known[:, None] + self.held.ahead[:passes] < self.count
        least = torch.where(inside, *self.held.limits)[..., None, None]
        front = Frontier(zeros, zeros, root, certain, certain, root.new_empty(*root.shape, 0, dtype=torch.bool))
        log_qs, fronts, layers, picks = [], [], [], []
        for depth in range(passes):
            if depth > 0:
                index = front.parents[:, None, :, None].expand(-1, features.shape[1], -1, features.shape[3])
                above = features.gather(2, index)
                first = front.seen.shape[2] - front.seen.shape[1]
                features = self._run(above, front.tokens, front.seen, first=first, depth=depth)
            places, near = self._followed(depth), self.held.seen[:, :3]
            logits, growth = self._logits(features), self.growth
            tokens, log_q, make_match = self.ranked(logits, places, growth.width, growth.spread)
            log_qs.append(log_q)
            if self._reads_traits:
                near = neighbours(self.held.seen, places, self.known, self.side)[:, 0]
            about = {"depth": depth, "side": self.side, "width": growth.width}
            of_nodes = {"places": places[:, 0], "reach": front.reach, "joint": front.joint, "near": near}
            layer = shown = Layer(**about, **of_nodes, rows=log_q, make_match=make_match, tokens=tokens)
            if self.policy.is_predictable:
                shown = dataclasses.replace(layer, make_match=None, tokens=None)
            fronts.append(front)
            layers.append(layer)
            chances = self.policy.chances(shown)
            chances = torch.where(chances >= least[:, depth], chances.clamp(MIN_LOG, MAX_LOG), self.held.stopped)
            more, joint, pick = self._candidates(front, layer, chances)
            parts.append(more)
            picks.append(pick)
            if depth + 1 < passes:
                front = front.below(more, joint, pick, self.held.identity)
        found = Candidates.joined(parts)
        kept = found.best_nodes(nodes if self.sizes is None else found.count)
        self._request_size(found, passes)
        depths, starts = (held[: found.count] for held in (self.held.depths, self.held.starts))
        best = torch.cat([front.best for front in fronts], 1)
        inner = best + self.held.firsts[: best.shape[1]]
        shape, below = shape_of(found, kept, inner, depths, starts, (self.growth.width,) * passes), None
        if self.records_log_q:  # of the children of each node; of leaves that of the root
            order = torch.arange(inner.shape[1], device=kept.device).expand_as(inner)
            rows = torch.zeros_like(found.tokens).scatter(1, inner, order).gather(1, kept)
            below = rows_at(torch.cat(log_qs, 1), rows)
        traits = self._traits(layers, picks, kept) if self.records_traits else None
        return DraftTree(found.tokens.gather(1, kept), shape, self.mode, below, traits=traits)

    def _candidates(
        self, front: Frontier, layer: Layer, chances: Float[Tensor, "b f k"]
    ) -> tuple[Candidates, Float[Tensor, "b m"] | None, Int[Tensor, "b m"] | None]:
        """Return the candidates of a further depth, their joint log probability (None where nothing reads it), and
        which children of the frontier they are (None: all).
        """
        assert layer.tokens is not None
        values, tokens, joint = (front.reach[..., None] + chances).flatten(1), layer.tokens.flatten(1), None
        places, pick = self.held.children[: values.shape[1]].expand_as(values), None
        if self._reads_traits:
            joint = (front.joint[..., None] + layer.match.clamp(min=MIN_LOG)).flatten(1)
        if self.sizes is not None:
            places = pick = self._picked(values, self.sizes[layer.depth])
            tokens, values = tokens.gather(1, pick), values.gather(1, pick)
            joint = None if joint is None else joint.gather(1, pick)
        return Candidates(tokens, places, values), joint, pick

    def _picked(self, values: Float[Tensor, "b m"], size: int) -> Int[Tensor, "b k"]:
        """Return the best children of a frontier, `size` at most, in order."""
        earliest = values + self.held.elder[: values.shape[1]]
        return earliest.topk(min(size, values.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values

    def _traits(self, layers: list[Layer], picks: list[Tensor | None], kept: Int[Tensor, "b n"]) -> Traits:
        """Return what is known of the nodes of the tree, for the records."""
        chosen = [
            traits if pick is None else traits.take_along_dim(pick[..., None], 1)
            for traits, pick in zip([traits_of(layer).flatten(1, 2) for layer in layers], picks, strict=True)
        ]
        every = torch.cat([torch.zeros_like(chosen[0][:, :1]), *chosen], 1)
        beams = torch.stack([padded_beam(layer.joint, self.growth.width) for layer in layers], 1)[:, 1:]
        return Traits(every.take_along_dim(kept[..., None], 1), beams)

    def _request_size(self, found: Candidates, passes: int) -> None:
        """Store the size that the next tree should have, the largest over the images, for the host to read."""
        if not self.needs_host:
            return
        wanted = self.policy.preferred_size(Pool(found.values[:, 1:], self.held.depths[1 : found.count], passes))
        nodes, depth = (torch.where(self.known < self.count, size, 0).amax() for size in wanted)
        self._wanted = (depth * SPAN + nodes.clamp(max=self.growth.nodes))[None]

    def _next_size(self) -> tuple[int, int]:
        """Return the drafted nodes and passes of this step, as the last step (on a GPU the one before) requested."""
        if self._wanted is not None:
            packed = self._readback.read(self._wanted)
            if packed is not None:
                depth, nodes = divmod(packed, SPAN)
                nodes = -(-max(nodes, 1) // STRIDE) * STRIDE
                self._size = min(nodes, self.growth.nodes), min(max(depth, 1), self.growth.depth)
        return self._size


@dataclass(frozen=True)
class FrequencyConfig:
    """Number of tokens of the table, and the digest of the target whose images were counted."""

    vocab_size: int
    kind: Literal["fr-spec"] = "fr-spec"
    target: str | None = None

    def __post_init__(self) -> None:
        check_limits(self, "vocab_size")


class FrequencyTable(nn.Module):
    """How often each token occurred: the add-on of FR-Spec."""

    counts: Tensor

    def __init__(self, config: FrequencyConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("counts", torch.zeros(config.vocab_size, dtype=torch.int32))

    @classmethod
    def of_tokens(cls, tokens: Int[Tensor, "*b n"], vocab_size: int, target: str | None = None) -> "FrequencyTable":
        """Count the tokens of some images."""
        table = cls(FrequencyConfig(vocab_size, target=target))
        table.counts.copy_(torch.bincount(tokens.flatten(), minlength=vocab_size))
        return table

    @property
    def ranking(self) -> Int[Tensor, " v"]:
        """Return all tokens, the most frequent first, the lower index first among equals."""
        return self.counts.sort(descending=True, stable=True).indices


class FrSpecDrafter(EagleDrafter):
    """FR-Spec: EAGLE's trees with the head's rows of the `vocabulary` most frequent tokens (arXiv:2502.14856).

    q is 0 elsewhere, verification covers all tokens. So the image stays that of plain decoding, and the share of drafts
    that can be right is at most the target's probability of these tokens. Tokens of images are used more evenly than
    the paper's words. ValueError for fewer tokens than a tree is wide, a table of another codebook, and a head without
    rows.
    """

    def __init__(self, module: Any, target: Any, table: FrequencyTable, *, vocabulary: int, **how: Any) -> None:
        if not isinstance(target.output, nn.Linear):
            raise ValueError("FR-Spec scores rows of a linear head, which this model lacks: use eagle1")
        if table.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"the frequency table is of {table.config.vocab_size} tokens, the model has {target.config.vocab_size}"
            )
        super().__init__(module, target, **how)
        self._frequent = table.ranking[:vocabulary].to(target.tok_embeddings.weight.device)
        self._head = target.output.weight[self._frequent].contiguous()
        if len(self._frequent) < (widest := self.tree.width):
            raise ValueError(
                f"the draft vocabulary has {len(self._frequent)} tokens, wanted at least {widest} for this tree"
            )

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        rows = F.linear(features.to(self._head.dtype), self._head).float()
        every = rows.new_full((*rows.shape[:-1], self.target.config.vocab_size), ABSENT)
        return every.index_copy(-1, self._frequent, rows)


class GrowingFrSpecDrafter(FrSpecDrafter, GrowingDrafter):
    """Drafts EAGLE-2's trees with the rows of a `share` of the tokens, at least as many as a tree is wide."""

    def __init__(
        self, module: Any, target: Any, *, table: FrequencyTable, share: float, growth: Growth, **how: Any
    ) -> None:
        vocabulary = max(round(share * table.config.vocab_size), growth.width)
        super().__init__(module, target, table, vocabulary=vocabulary, growth=growth, **how)
