"""Drafters made of two models or of two drafters: cascades with a smaller model, SAM with EAGLE-1."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.core.types import Buffers, DraftMode, DraftTree, ImageMemory, Prompt, Step, Target
from lantern.core.weights import quantized
from lantern.decoding.cache import PromptCache, prefill
from lantern.drafters.base import ranking
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.lookup import SamDrafter
from lantern.drafters.trees import StaticTree, TreeDrafter, chain

# what both models have in common; `words` are those of targets with token prompts
SIZES = ("vocab_size", "block_size", "cls_token_num", "model_type", "raster", "family", "words")


class SmallModel:
    """Cache and passes of a smaller model of the same tokens that drafts for the target.

    Beside a LlamaGen target it is a LlamaGen transformer, beside a target of transformers one of the same family. It
    has read `known` tokens; committed tokens wait for the next pass. Its distributions use the target's `sampling`,
    guidance and filters included. ValueError for a model with other tokens, grids or prompts.
    """

    cache: Any = None  # its memory serves the next generation of the same sizes

    def __init__(self, model: Target, target: Target, *, sampling: Sampling, stage: int) -> None:
        for name in SIZES:
            got, expected = (getattr(config, name, None) for config in (model.config, target.config))
            if got != expected:
                raise ValueError(
                    f"the small model has {name} {got}, its target {expected}: use one with the target's sizes"
                )
        self.model, self.sampling, self.stage = model, sampling, stage
        self.draft_sampling = ranking(sampling)
        self._prompts, self.held = PromptCache(), Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        assert prompt.condition is not None
        self.noise, self.count, self.rows = noise, self.model.config.block_size, self.sampling.rows
        how = {"stage": self.stage, "cache": self.cache, "prompts": self._prompts}
        prompt, self.cache = prefill(self.model, prompt.condition, self.rows, **how)
        self._mask = self.cache.tree_mask(self.cache.prefix_scores, self.stage)
        self.held.slots = torch.arange(self.stage, device=prompt.mask.device) + self.cache.first_stage_slot
        self.held.known = torch.zeros(len(prompt.mask), dtype=torch.long, device=prompt.mask.device)
        self._is_read = True

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """Its tensors, keys and values."""
        return self.held, self.cache

    def take(self, step: Step) -> None:
        """Keep the committed tokens of a step for the next pass; of given tokens there are several steps before it."""
        if not self._is_read:
            self.read()
        self._is_read = False
        self.held.assign(waiting=step.tokens, counts=step.counts)

    @property
    def known(self) -> Int[Tensor, " b"]:
        """Number of tokens of each image that the small model has read."""
        return self.held.known

    @property
    def last(self) -> Int[Tensor, "b 1"]:
        """The last committed token."""
        return self.held.waiting.gather(1, (self.held.counts - 1).clamp(min=0)[:, None])

    def read(self) -> Float[Tensor, "b 1 v"]:
        """Read the waiting tokens and return log q of what follows the last of them."""
        count = self.held.waiting.shape[1]
        causal = torch.ones(count, count, dtype=torch.bool, device=self.known.device).tril()
        steps = torch.arange(count, device=self.known.device)
        logits = self._pass(self.held.waiting, self.known[:, None] + steps, causal, 0)
        self.cache.commit(steps.expand(len(self.known), -1), self.known)
        last = (self.held.counts - 1).clamp(min=0)[:, None, None, None]
        self.known.add_(self.held.counts)
        self._is_read = True
        return self._log_probs(logits.take_along_dim(last, 2), 0)

    def score(
        self, tokens: Int[Tensor, "b f"], ancestors: Bool[Tensor, "f m"], first: int, depths: Int[Tensor, " f"] | int
    ) -> Float[Tensor, "b f v"]:
        """Return log q of what follows drafted tokens `depths` behind the last committed one.

        They are staged from slot `first` on and see the staged tokens that `ancestors` selects.
        """
        logits = self._pass(tokens, (self.known[:, None] + depths - 1).expand_as(tokens), ancestors, first)
        return self._log_probs(logits, depths)

    def ranked(self, log_q: Float[Tensor, "b f v"], depths: Int[Tensor, " f"] | int, width: int) -> Tensor:
        """Return the `width` best tokens of log q + g at each node, best first, with the target's noise."""
        return (log_q + self.noise.gumbel(self._places(depths), Purpose.TARGET)).topk(width, dim=-1).indices

    def _pass(
        self, tokens: Int[Tensor, "b f"], places: Int[Tensor, "b f"], ancestors: Bool[Tensor, "f m"], first: int
    ) -> Float[Tensor, "b r f v"]:
        rows, images = self.rows, len(tokens)
        inputs = self.model.tok_embeddings(tokens).repeat_interleave(rows, 0)
        positions = (places.clamp(max=self.count - 1) + self.model.config.cls_token_num).repeat_interleave(rows, 0)
        mask = self._mask.update(self.known, ancestors)
        slots = self.held.slots[first : first + tokens.shape[1]].expand(images * rows, -1)
        return self.model(inputs, positions, mask, cache=self.cache, slots=slots).logits.unflatten(0, (images, rows))

    def _log_probs(self, logits: Float[Tensor, "b r f v"], depths: Int[Tensor, " f"] | int) -> Float[Tensor, "b f v"]:
        return self.draft_sampling.log_probs(logits, self._places(depths).expand(-1, logits.shape[2]))

    def _places(self, depths: Int[Tensor, " f"] | int) -> Int[Tensor, "*b #f"]:
        """Return the numbers of the tokens that follow nodes of these depths."""
        return (self.known[:, None] + depths).clamp(max=self.count - 1)


class SelfCascadeDrafter(TreeDrafter):
    """Self-cascade: a static tree of a small model's samples, the best of log q + g below each node.

    Both models sample argmax(log p + g) with the same g, so a draft is right wherever both distributions have the same
    arg-max. The acceptance is the Gumbel coupling of the two models (arXiv:2408.07978). Only the small model is
    trained. Committed tokens are read in the pass that gives the distribution of the first child, so a tree of depth d
    costs d small passes. With `records_log_q` trees carry the small model's log q.
    """

    mode: DraftMode = "gumbel"

    def __init__(
        self, model: Target, target: Target, *, tree: StaticTree, sampling: Sampling, records_log_q: bool = False
    ) -> None:
        self.small = SmallModel(model, target, sampling=sampling, stage=max(tree.depth + 1, tree.num_inner, 1))
        self.tree, self.records_log_q = tree, records_log_q

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        super().begin(prompt, noise)
        self.small.begin(prompt, noise)

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """That of the small model."""
        return self.small.memory

    def propose(self) -> DraftTree:
        """Read the committed tokens and grow the tree."""
        ranked, log_qs = [self.small.last], [self.small.read()]
        for depth, level in enumerate(self.levels):
            if depth > 0:
                log_qs.append(self.small.score(ranked[-1][:, level.pairs], level.ancestors, level.first, depth))
            ranked.append(self.small.ranked(log_qs[-1], depth, level.width).flatten(1))
        return self.drafted(ranked, log_qs)

    def observe(self, step: Step) -> None:
        """Keep the committed tokens for the next pass."""
        self.small.take(step)


class CascadeDrafter(TreeDrafter):
    """A cascade: a drafter guesses for a small model, and that one for the target (SpecMQuant, arXiv:2505.22179).

    EAGLE's module drafts a chain of `length` - 1. The small `model`, with 4-bit layers if `bits` is 4, scores it in one
    pass and resamples every token of it with the target's noise, in `rounds` rounds. After t of them at least the first
    t tokens, and all tokens before the first that the last round changed, equal the small model's own samples. The
    target verifies the chain, with the next best tokens as siblings, `width` candidates at each place. With 0 rounds
    the model resamples until a round changes no token, at most `length` times: all tokens are then its own samples.
    Trees carry in `log_q` the small model's distributions, given the tokens of the round before. ValueError for a width
    beyond the codebook and for 4-bit layers of a model that is not LlamaGen's.
    """

    mode: DraftMode = "gumbel"

    def __init__(
        self,
        module: Any,
        target: Target,
        model: Any,
        *,
        length: int,
        width: int,
        rounds: int,
        bits: int = 0,
        sampling: Sampling,
    ) -> None:
        if width > target.config.vocab_size:
            raise ValueError(f"width is {width}, wanted at most {target.config.vocab_size}, the number of tokens")
        if bits == 4:
            if model.config.family != "llamagen":
                raise ValueError("small_bits=4 quantizes LlamaGen's layers only: leave it at 0 for this model")
            model = quantized(model)
        self.drafter = EagleDrafter(module, target, tree=chain(length - 1), mode="gumbel", sampling=sampling)
        self.small = SmallModel(model, target, sampling=sampling, stage=length + 1)
        # a chain with siblings at each token
        self.tree = StaticTree(tuple((0,) * depth + (rank,) for depth in range(length) for rank in range(width)))
        self.width, self.rounds, self.held = width, rounds, Buffers()
        self.needs_whole_prefix = self.drafter.needs_whole_prefix
        self.needs_host = not rounds  # which counts the rounds
        self.drafter.most_committed = length + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Let the inner drafter and the small model read the prompt."""
        super().begin(prompt, noise)
        self.drafter.begin(prompt, noise)
        self.small.begin(prompt, noise)
        device = prompt.mask.device
        self.held.depths = torch.arange(self.depth, device=device)
        self.held.sees = torch.ones(self.depth - 1, self.depth - 1, dtype=torch.bool, device=device).tril()

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """That of the inner drafter and of the small model."""
        return *self.drafter.memory, *self.small.memory

    def propose(self) -> DraftTree:
        """Draft a chain, resample it with the small model, and return its tokens with their log q."""
        root, first = self.small.last, self.small.read()
        log_q = first
        ranked = self.drafter.propose().tokens[:, 1:, None]
        for _ in range(self.rounds or self.depth):
            known = ranked[:, : self.depth - 1, 0]
            rest = self.small.score(known, self.held.sees, 0, self.held.depths[1:])
            log_q = torch.cat([first, rest], 1)
            ranked = self.small.ranked(log_q, self.held.depths, self.width)
            if not self.rounds and torch.equal(ranked[:, : self.depth - 1, 0], known):
                break
        return self.drafted([root, ranked.flatten(1)], [log_q])

    def observe(self, step: Step) -> None:
        """Pass the step to the inner drafter and the committed tokens to the small model."""
        self.drafter.observe(step)
        self.small.take(step)


class RouterDrafter(TreeDrafter):
    """SAM and EAGLE-1 in one tree: the candidates of both drafters share a root; both observe every step.

    SAM decoding (arXiv:2411.10666) chooses between retrieval and a drafter by the length of the match. With Gumbel
    match no choice is needed: the tokens are the target's for any tree, so both trees are joined at the root and the
    longer matching path is taken. Nodes that both propose are scored twice; the result is the same.
    """

    mode: DraftMode = "gumbel"
    records_log_q = False

    def __init__(self, eagle: EagleDrafter, sam: SamDrafter) -> None:
        self.eagle, self.sam, self.held = eagle, sam, Buffers()
        first = max(choice[0] for choice in eagle.tree.choices) + 1  # children of the root
        later = ((choice[0] + first, *choice[1:]) for choice in sam.tree.choices)
        self.choices = ((), *eagle.tree.choices, *later)
        self.tree = StaticTree(self.choices[1:])
        self.needs_whole_prefix, self.taps = eagle.needs_whole_prefix, eagle.taps
        eagle.most_committed = self.depth + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Begin both drafters."""
        super().begin(prompt, noise)
        self.eagle.begin(prompt, noise)
        self.sam.begin(prompt, noise)
        order = [self.choices.index(choice) for choice in ((), *self.tree.choices)]
        self.held.order = torch.tensor(order, device=prompt.mask.device)
        self.order = self.held.order

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """That of both drafters."""
        return *self.eagle.memory, *self.sam.memory

    def propose(self) -> DraftTree:
        """Return both trees below the last committed token."""
        return self.drafted([self.eagle.propose().tokens, self.sam.propose().tokens[:, 1:]], [])

    def observe(self, step: Step) -> None:
        """Pass the step to both drafters."""
        self.eagle.observe(step)
        self.sam.observe(step)
