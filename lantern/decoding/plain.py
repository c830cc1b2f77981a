"""Plain decoding, one token per step: the baseline of speedups and the reference of tests.

Token j of each image is argmax(log p_j + g_j), with the noise g of its key (seed, image number). Up to rounding, an
image's tokens do not depend on its batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import (
    Buffers,
    Condition,
    Drafter,
    DraftMode,
    DraftTree,
    Generation,
    Prompt,
    Scores,
    Step,
    Target,
    TreeShape,
)
from lantern.decoding.cache import by_line, by_row, read_tokens
from lantern.decoding.loop import Inputs, LogitRows, State, begin, run
from lantern.decoding.statistics import StepSums
from lantern.verifiers.gumbel import GumbelVerifier


class NoDrafts(Drafter):
    """A drafter of trees without drafts: with Gumbel match a step is one of plain decoding.

    `Plain` itself writes keys and values to the slots of their tokens, which generations that began at different times
    do not have in common.
    """

    mode: DraftMode = "point"
    max_nodes, depth = 1, 0

    def __init__(self) -> None:
        self.held = Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Begin; step 0 brings the first token."""

    def observe(self, step: Step) -> None:
        """Keep the last token."""
        self.held.last = step.tokens.gather(1, (step.counts - 1).clamp(min=0)[:, None])

    def propose(self) -> DraftTree:
        """Return the last token."""
        return DraftTree(self.held.last.clone(), TreeShape.chain(0, self.held.last.device), self.mode)


class Plain(State):
    """A generation without drafts, whose images all have as many tokens. The cache needs no stage."""

    def __init__(self, target: Target, sampling: Sampling) -> None:
        super().__init__(target, sampling, NoDrafts(), GumbelVerifier())

    def start(self, prompt: Prompt) -> Step:
        """Take over the prompt, which fills `cache`; return the step that gives token 0 and the given tokens after."""
        cache, images, device, held = self.cache, len(prompt.mask), prompt.mask.device, self.held
        self.statistics = StepSums(images, 0, self.count, device)
        held.tokens = torch.zeros(images, self.count, dtype=torch.long, device=device)
        held.total = torch.zeros(images, dtype=torch.float32, device=device)
        held.known = torch.zeros(images, dtype=torch.long, device=device)
        held.one = torch.ones_like(held.known)
        hidden = -torch.inf if self.target.follows_masks else 0.0
        mask = cache.prefix_scores.new_full((images, cache.rows, 1, cache.slots), hidden)
        mask[..., : cache.prefix] = by_row(cache.prefix_scores)
        held.shown = mask.flatten(0, 1)
        scores = Scores(prompt.logits, prompt.features[:, :, -1:])
        first, self.kept = self._sample(scores), 1
        held.known.fill_(1)
        if self.forced is not None and (kept := self.forced.common_prefix) > 1:
            tokens = self.forced.tokens[:, :kept]
            self.statistics.steps += read_tokens(self.target, cache, tokens[:, :-1])[1]
            held.shown[..., cache.prefix : cache.prefix + kept - 1] = 0.0
            held.tokens[:, :kept] = tokens
            held.known, self.kept = held.known + (kept - 1), kept
            first = replace(first, counts=first.counts + (kept - 1), tokens=tokens)
        held.place = held.known[:1, None] - 1  # of the last token; all images have as many
        held.slot, held.position = held.place + cache.prefix, held.place + self.target.config.cls_token_num
        return first

    def draft(self) -> Inputs:
        """Return the pass that scores the last token of each image."""
        held, lines = self.held, len(self.held.shown)
        if self.target.follows_masks:
            held.shown.index_fill_(-1, held.slot[0], 0.0)
        place = held.place.expand(len(self.known), -1)
        embedded = by_line(self.target.tok_embeddings(self.tokens.gather(1, place)), self.cache.rows)
        slots, positions = held.slot.expand(lines, -1), held.position.expand(lines, -1)
        return Inputs(embedded, positions, held.shown, self.cache, slots, place)

    def finish(self, found: Scores) -> Step:
        """Sample the next token."""
        self.watch.lap("score")
        step = self._sample(self.by_image(found, self.known[:, None]))
        counters = [self.held.known, self.held.place, self.held.slot, self.held.position]
        torch._foreach_add_(counters, 1)  # pyright: ignore[reportPrivateImportUsage]
        return step

    def _sample(self, scores: Scores) -> Step:
        place = self.known[:, None]
        rows = LogitRows(self.sampling, scores.logits, place, self.noise, self.sampler)
        token = rows.sample_into(self.tokens, self.held.total)
        start = self.known.clone()
        self.watch.lap("draw")
        return Step(0, start, self.held.one, token, scores)

    @property
    def stage(self) -> int:
        """No slots: keys and values are written to the slots of their tokens."""
        return 0

    def advance(self, known: int, steps: int) -> None:
        """Count the steps up to `known` tokens: one a token."""
        self.index = known - self.kept

    def is_done(self) -> bool:
        """Return whether all tokens are decided, which the host counts."""
        return self.index + self.kept >= self.end

    def result(self) -> Generation:
        """Return the finished grids."""
        self.statistics.steps += self.index
        return super().result()


def generate(
    target: Target, condition: Condition, *, sampling: Sampling, keys: Sequence[tuple[int, int]], **how: Any
) -> Generation:
    """Decode a batch plainly, without an engine; `how` are other arguments of `loop.begin` and `callback`."""
    callback = how.pop("callback", None)
    return run(begin(Plain(target, sampling), condition, keys=keys, **how), callback=callback)
