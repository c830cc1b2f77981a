"""A smaller model of the same tokens that drafts for the target.

It uses the target's noise: where both distributions have the same arg-max of log p + g, both sample the same token.
Beside a LlamaGen target it is a LlamaGen transformer, beside a target of transformers one of the same family.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.core.types import Buffers, Prompt, Step, Target
from lantern.decoding.prompt import PromptCache, make_cache
from lantern.drafters.base import ranking

SIZES = ("vocab_size", "block_size", "cls_token_num", "model_type", "raster")
TOKEN_SIZES = ("family", "words")  # of targets with token prompts


class SmallModel:
    """The small model's cache and passes. It has read `known` tokens; committed tokens wait for the next pass.

    Its distributions use the target's `sampling`, guidance and filters included. ValueError for a model with other
    tokens, grids or prompts.
    """

    cache: Any = None  # its memory serves the next generation of the same sizes

    def __init__(self, model: Target, target: Target, *, sampling: Sampling, stage: int) -> None:
        for name in (*SIZES, *(() if target.config.family == "llamagen" else TOKEN_SIZES)):
            got, expected = getattr(model.config, name, None), getattr(target.config, name)
            if got != expected:
                raise ValueError(
                    f"the small model has {name} {got}, its target {expected}: use one with the target's sizes"
                )
        self.model, self.sampling, self.stage = model, sampling, stage
        self.draft_sampling = ranking(sampling)
        self._prompts, self.held = PromptCache(), Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Read the prompt."""
        rows = self.sampling.rows
        assert prompt.condition is not None
        prompt = self._prompts.read(self.model, prompt.condition, rows)
        self.noise, self.count, self.rows = noise, self.model.config.block_size, rows
        self.cache = make_cache(self.model, prompt, self.stage, used=self.cache)
        self.cache.fill(prompt)
        self._mask = self.cache.tree_mask(self.cache.prefix_scores, self.stage)
        self.held.slots = torch.arange(self.stage, device=prompt.mask.device) + self.cache.first_stage_slot
        self.held.known = torch.zeros(len(prompt.mask), dtype=torch.long, device=prompt.mask.device)
        self._is_read = True

    def take(self, step: Step) -> None:
        """Keep the committed tokens of a step for the next pass; of given tokens there are several steps before it."""
        if not self._is_read:
            self.read()
        self._is_read = False
        self.held.hold(waiting=step.tokens, counts=step.counts)

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
        slots = self.held.slots[first : first + tokens.shape[1]].expand(images * rows, -1)
        scores = self.model(
            self.model.tok_embeddings(tokens).repeat_interleave(rows, 0),
            (places.clamp(max=self.count - 1) + self.model.config.cls_token_num).repeat_interleave(rows, 0),
            self._mask.update(self.known, ancestors),
            cache=self.cache,
            slots=slots,
        )
        return scores.logits.unflatten(0, (images, rows))

    def _log_probs(self, logits: Float[Tensor, "b r f v"], depths: Int[Tensor, " f"] | int) -> Float[Tensor, "b f v"]:
        return self.draft_sampling.log_probs(logits, self._places(depths).expand(-1, logits.shape[2]))

    def _places(self, depths: Int[Tensor, " f"] | int) -> Int[Tensor, "*b #f"]:
        """Return the numbers of the tokens that follow nodes of these depths."""
        return (self.known[:, None] + depths).clamp(max=self.count - 1)
