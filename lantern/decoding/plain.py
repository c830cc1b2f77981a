"""Plain decoding, one code a pass: the baseline of every speedup and the oracle of every test."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lantern.decoding.cache import StaticCache
from lantern.decoding.finite import FiniteSoFar
from lantern.decoding.graphs import GraphedTurns
from lantern.decoding.prefill import FirstScores, PromptCache, Start, start
from lantern.decoding.stopwatch import Stopwatch
from lantern.decoding.telling import tell
from lantern.decoding.turns import Turns
from lantern.sampling import Sampling
from lantern.types import Callback, Condition, Generation, Scores, Step, Target


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    drafter: None = None,
    verifier: None = None,
    callback: Callback | None = None,
    keep_steps: bool = False,
    is_timed: bool = False,
    cache: StaticCache | None = None,
    prompts: PromptCache | None = None,
    reproducible: bool = False,
    graphs: bool = False,
) -> Generation:
    """Draws code j of each image as argmax(log p_j + g_j), with the noise g of its key (seed, image number).

    `drafter` and `verifier` are part of the signature that all decoders share, and None here. `callback` sees every
    step. With `graphs` a step is one CUDA graph. An image's codes do not depend on its batch, but for rounding.
    """
    condition = condition.to(target.tok_embeddings.weight.device)
    watch, steps = Stopwatch(condition.device, is_timed), list[Step]()
    kept = steps if keep_steps else None
    # 1) the prompt gives code 0
    how: dict[str, Any] = {"cache": cache, "prompts": prompts, "reproducible": reproducible}
    run = PlainTurns(target, start(target, condition, sampling=sampling, keys=keys, stage=0, **how), sampling, watch)
    watch.lap("prefill")
    tell(run.draw_first(), callback, kept)
    turns: Turns = GraphedTurns(run) if graphs else run
    for _ in range(target.config.block_size - 1):
        # 2) score the last code and draw the next
        tell(turns.turn(), callback, kept)
    return run.generation(steps)


class PlainTurns(Turns):
    """Passes over one code each. `place` is the number of the code that was drawn last, the same in every image."""

    def __init__(self, target: Target, begun: Start, sampling: Sampling, watch: Stopwatch) -> None:
        self.target, self.begun, self.sampling, self.watch = target, begun, sampling, watch
        cache, images, device = begun.cache, len(begun.mask), begun.mask.device
        self.codes = torch.zeros(images, target.config.block_size, dtype=torch.long, device=device)
        self.place, self.drawn = self.codes.new_zeros(images, 1), self.codes.new_zeros(images, 1)
        self.finite = FiniteSoFar(images, device)
        mask = cache.buffer.new_full((images, cache.rows, 1, cache.slots), -torch.inf)
        mask[..., : cache.prefix] = begun.prefix[:, None, None]
        self.mask = mask.flatten(0, 1)
        self._numbers = torch.arange(self.codes.shape[1], device=device).expand(images, -1)
        self._once = torch.ones_like(self.place[:, 0])
        self._index = 0

    @property
    def owners(self) -> tuple[object, ...]:
        """Itself."""
        return (self,)

    def draw_first(self) -> Step:
        """Draws code 0 from what the prompt says."""
        logits, features = self.begun.logits, self.begun.features[:, :, -1:]
        return self.book(self.draw(FirstScores(logits.flatten(0, 1), features.flatten(0, 1))))

    def work(self) -> Step:
        """Scores the last code and draws the next."""
        prefix, config = self.begun.cache.prefix, self.target.config
        self.mask.index_fill_(-1, self.place[0] + prefix, 0.0)
        at = self.place[:1].expand(len(self.mask), -1)
        inputs = self.target.tok_embeddings(self.drawn).repeat_interleave(self.begun.cache.rows, 0)
        scores = self.target(inputs, at + config.cls_token_num, self.mask, cache=self.begun.cache, slots=at + prefix)
        self.place = self.place + 1
        self.watch.lap("score")
        return self.draw(scores)

    def draw(self, scores: Scores) -> Step:
        """Draws the code at `place` from the law that a pass gave."""
        logits = scores.logits.unflatten(0, (-1, self.begun.cache.rows))
        law = self.sampling.scores(logits, self.place)
        self.drawn = (law + self.begun.noise.gumbel(self.place)).argmax(-1)
        self.codes.scatter_(1, self.place, self.drawn)
        self.finite.look(logits)
        self.watch.lap("draw")
        return Step(0, self.place[:, 0], self._once, self.drawn, scores)

    def book(self, step: Step) -> Step:
        """The step with its number, its codes where no later step writes."""
        j, self._index = self._index, self._index + 1
        return replace(step, index=j, start=self._numbers[:, j], codes=self.codes[:, j : j + 1])

    def generation(self, steps: list[Step]) -> Generation:
        """The finished grids."""
        images, count = self.codes.shape
        none, free = self.codes.new_zeros(images, 0), torch.zeros(images, device=self.codes.device)
        return Generation(
            codes=self.codes,
            passes=self.codes.new_full((images,), count),
            accepted=none,
            reached=none,
            relaxed=free,
            total_variation=free.clone(),
            steps=steps,
            seconds=self.watch.seconds,
            is_finite=self.finite.flags,
        )
