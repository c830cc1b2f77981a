"""Plain decoding, one code per pass: the baseline of speedups and the reference of tests."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation, Scores, Step, Target
from lantern.decoding.cache import by_row
from lantern.decoding.forced import PassScores
from lantern.decoding.loop import Decoding, FiniteSoFar, Stepper, Stopwatch
from lantern.decoding.prompt import Start, read_codes


@torch.no_grad()
def generate(
    target: Target,
    condition: Condition,
    *,
    drafter: None = None,
    verifier: None = None,
    **options: Any,
) -> Generation:
    """Sample code j of each image as argmax(log p_j + g_j), with the noise g of its key (seed, image number).

    `options` are the fields of `Decoding`. `drafter` and `verifier` are part of the signature of `loop.generate`, and
    None here. Codes that all images keep from the start are read in few passes, and reported with code 0. Up to
    rounding, an image's codes do not depend on its batch.
    """
    how = Decoding(**options)
    watch = how.stopwatch(target)
    # 1) the prompt gives code 0
    run = PlainStepper(target, how.start(target, condition, stage=0), how.sampling, watch)
    run.read_kept()
    return run_steps(run, how)


def run_steps(run: "PlainStepper", how: Decoding) -> Generation:
    """Take all steps of a stepper whose prompt has been read, and return the finished grids."""
    run.watch.lap("prefill")
    how.report(run.sample_first())
    stepper = how.programs.wrap(run)
    for _ in range(run.target.config.block_size - run.kept):
        # 2) score the last code and sample the next
        how.report(stepper.take_step())
    return run.generation(how.steps)


class PlainStepper(Stepper):
    """Steps of one code each. `place` is the number of the last sampled code, the same in every image.

    The first step gives the first `kept` codes; its scores are those of code 0.
    """

    on_host = (*Stepper.on_host, "kept", "_passes")

    def __init__(self, target: Target, begun: Start, sampling: Sampling, watch: Stopwatch) -> None:
        self.target, self.begun, self.sampling, self.watch = target, begun, sampling, watch
        cache, images, device = begun.cache, len(begun.mask), begun.mask.device
        self.codes = torch.zeros(images, target.config.block_size, dtype=torch.long, device=device)
        self.place, self.sampled = self.codes.new_zeros(images, 1), self.codes.new_zeros(images, 1)
        self.finite = FiniteSoFar(images, device)
        mask = cache.buffer.new_full((images, cache.rows, 1, cache.slots), -torch.inf)
        mask[..., : cache.prefix] = by_row(begun.prefix)
        self.mask = mask.flatten(0, 1)
        self._numbers = torch.arange(self.codes.shape[1], device=device).expand(images, -1)
        self._once = torch.ones_like(self.place[:, 0])
        self._index, self.kept, self._passes = 0, 1, self.codes.shape[1]

    def read_kept(self) -> None:
        """Fill the cache with the codes that all images keep from the start but the last, with which steps begin."""
        if self.begun.forced is None or (kept := self.begun.forced.kept) == 1:
            return
        cache, codes = self.begun.cache, self.begun.forced.codes[:, :kept]
        passes = read_codes(self.target, cache, self.begun.prefix, codes[:, :-1]).passes
        self.mask[..., cache.prefix : cache.prefix + kept - 1] = 0.0
        self.codes[:, :kept] = codes
        self.kept, self._passes = kept, self.codes.shape[1] - kept + 1 + passes

    @property
    def state_holders(self) -> tuple[object, ...]:
        """Itself."""
        return (self,)

    def sample_first(self) -> Step:
        """Sample code 0 from the logits of the prompt."""
        logits, features = self.begun.logits, self.begun.features[:, :, -1:]
        first = self.sample(PassScores(logits.flatten(0, 1), features.flatten(0, 1)))
        self.place = self.place + self.kept - 1
        self.sampled = self.codes.gather(1, self.place)
        return self.record_step(replace(first, counts=first.counts * self.kept))

    def work(self) -> Step:
        """Score the last code and sample the next."""
        prefix, config = self.begun.cache.prefix, self.target.config
        slots = (self.slots(self.place[:1]) + prefix).expand(len(self.mask), -1)
        self.mask.index_fill_(-1, slots[0], 0.0)
        at = self.place[:1].expand(len(self.mask), -1)
        inputs = self.target.tok_embeddings(self.sampled).repeat_interleave(self.begun.cache.rows, 0)
        scores = self.target(inputs, at + config.cls_token_num, self.mask, cache=self.begun.cache, slots=slots)
        self.place = self.place + 1
        if self.begun.forced is not None:
            scores = self.begun.forced.scores(scores, self.place)
        self.watch.lap("score")
        return self.sample(scores)

    def slots(self, places: Int[Tensor, "1 1"]) -> Int[Tensor, "1 1"]:
        """Return the slots of these codes in the cache, counted from the first code's."""
        return places

    def sample(self, scores: Scores) -> Step:
        """Sample the code at `place` from the logits of a pass."""
        logits = scores.logits.unflatten(0, (-1, self.begun.cache.rows))
        quick = self.target.sampler(self.sampling, self.begun.noise)
        if quick is not None:
            self.sampled = quick(logits, self.place)[..., 0]
        else:
            log_probs = self.sampling.scores(logits, self.place)
            self.sampled = (log_probs + self.begun.noise.gumbel(self.place)).argmax(-1)
        self.codes.scatter_(1, self.place, self.sampled)
        self.finite.look(logits)
        self.watch.lap("draw")
        return Step(0, self.place[:, 0], self._once, self.sampled, scores)

    def record_step(self, step: Step) -> Step:
        """Return the step with its number; its codes are in memory that no later step writes to."""
        j, self._index = self._index, self._index + 1
        first = j + self.kept - 1 if j else 0
        return replace(step, index=j, start=self._numbers[:, first], codes=self.codes[:, first : j + self.kept])

    def generation(self, steps: list[Step]) -> Generation:
        """Return the finished grids."""
        images = len(self.codes)  # cloned: a graph keeps its memory for the next generation
        none, free = self.codes.new_zeros(images, 0), torch.zeros(images, device=self.codes.device)
        return Generation(
            codes=self.codes.clone(),
            passes=self.codes.new_full((images,), self._passes),
            accepted=none,
            reached=none,
            relaxed=free,
            total_variation=free.clone(),
            steps=steps,
            seconds=self.watch.seconds,
            is_finite=self.finite.flags.clone(),
        )
