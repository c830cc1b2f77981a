"""Length and learning rates of a training: given in steps, or fitted to a time."""

import sys
import time
from dataclasses import dataclass, replace

SKIPPED = 3  # first steps, which compile kernels and fill caches, and are not part of the measured rate
LEAST = 5  # measured steps before their number is fixed
MEASURED = 0.1  # share of the time after which the number of steps is fixed
MARGIN = 0.97  # share of the remaining time that steps are planned for
UNKNOWN = 1 << 31  # steps of a timed training before they are fixed


@dataclass(frozen=True)
class LoopConfig:
    """Length and schedule of a training. Learning rates belong to the task's optimizers; the loop scales them.

    The scale rises linearly over `warmup` steps, stays at one, and falls linearly to zero over the last `decay` steps.
    With `minutes` above 0 the training measures its rate and sets `steps` and `decay`, in the same proportion, to fill
    this time; the inputs of the task are prepared before it. `clip` bounds the norm of the gradients, 0 for no bound.
    Every `save_seconds` a checkpoint replaces the previous one; the batch of a step is a pure function of
    (seed, step, rank), so that a resumed run ends with the same weights on a CPU. An update averages the gradients of
    `accumulate` batches. With `ema` above 0, held-out figures and exported weights are those of an exponential moving
    average with this decay per step. ValueError for values out of range.
    """

    steps: int
    seed: int = 0
    warmup: int = 100
    decay: int = 0
    clip: float = 1.0
    precision: str = "bf16"
    save_seconds: float = 60.0
    log_every: int = 10
    evaluate_every: int = 500
    accumulate: int = 1
    ema: float = 0.0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f'precision is "{self.precision}", wanted "bf16" or "fp32"')
        if self.steps < 1 or self.warmup < 0 or not 0 <= self.decay <= self.steps:
            raise ValueError(
                f"steps {self.steps}, warmup {self.warmup}, decay {self.decay}: wanted at least 1, at least 0, and "
                "from 0 to the number of steps"
            )
        if self.accumulate < 1 or not 0 <= self.ema < 1:
            raise ValueError(f"accumulate {self.accumulate}, ema {self.ema}: wanted at least 1, and from 0 to below 1")
        if self.minutes < 0:
            raise ValueError(f"minutes is {self.minutes}, wanted at least 0 (0: as many steps as `steps`)")

    @property
    def lengths(self) -> dict[str, int]:
        """The numbers of steps: of all, of the final decay and of the warm-up."""
        return {"steps": self.steps, "decay": self.decay, "warmup": self.warmup}

    def scale(self, step: int) -> float:
        """Return the factor on every learning rate at a step."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        fall = min(1.0, (self.steps - step) / max(1, self.decay))
        return rise * fall


def adjusted(
    loop: LoopConfig, *, steps: int | None = None, decay: int | None = None, minutes: float | None = None
) -> LoopConfig:
    """Return the loop with options of the command line; a decay of more steps than there are is shortened.

    ValueError if both steps and minutes are given.
    """
    if minutes is not None:
        if steps is not None:
            raise ValueError("got --steps and --minutes: give one of them")
        loop = replace(loop, minutes=minutes)
    length = loop.steps if steps is None else steps
    fall = loop.decay if decay is None else decay
    if fall > length:
        print(f"decay is {fall} steps, more than the {length} steps of this training: set to {length}", file=sys.stderr)
        fall = length
    return replace(loop, steps=length, decay=fall)


class TimePlan:
    """Fits the number of steps of a training to a time.

    The number is fixed once, after MEASURED of the time, from the rate of the steps until then and the duration of an
    evaluation. If the training is late when the decay of the learning rate begins, the rest is shortened.
    """

    def __init__(self, config: LoopConfig, *, spent: float = 0.0) -> None:
        self.config, self.budget = config, 60 * config.minutes
        self.is_fixed = False
        self._began = time.monotonic() - spent
        self._first: tuple[int, float] | None = None  # a step and the elapsed seconds after it
        self._evaluating = 0.0
        self._is_measuring = False  # the skipped steps are done

    @property
    def elapsed(self) -> float:
        """Seconds since the training began, those before an interruption included."""
        return time.monotonic() - self._began

    @property
    def open_schedule(self) -> LoopConfig:
        """The schedule before the number of steps is known: the warm-up and a constant rate."""
        return replace(self.config, steps=UNKNOWN, decay=0)

    def count_step(self, done: int) -> None:
        """Note a finished step."""
        if self._first is None:
            self._first = (done, self.elapsed)
        elif done - self._first[0] == SKIPPED and not self._is_measuring:
            self._first, self._evaluating = (done, self.elapsed), 0.0
            self._is_measuring = True

    def count_evaluation(self, seconds: float) -> None:
        """Note the duration of an evaluation."""
        self._evaluating += seconds

    def is_due(self, done: int) -> bool:
        """Return whether the number of steps is to be fixed now."""
        first = self._first[0] if self._first else done
        is_measured = self._is_measuring and done - first >= LEAST and self.elapsed >= MEASURED * self.budget
        return not self.is_fixed and (is_measured or self.elapsed >= 0.5 * self.budget)

    def is_late(self, done: int, schedule: LoopConfig) -> bool:
        """Return whether the remaining steps of the schedule take longer than the remaining time."""
        return self.elapsed + (schedule.steps - done) * self._seconds_per_step(done) > self.budget

    def fixed(self, done: int, evaluation: float) -> LoopConfig:
        """Return the schedule that fills the remaining time; `evaluation` is the duration of one in seconds."""
        left = MARGIN * max(0.0, self.budget - self.elapsed - evaluation)
        each = self._seconds_per_step(done) + evaluation / self.config.evaluate_every
        steps = done + max(1, int(left / max(each, 1e-9)))
        decay = min(round(self.config.decay / self.config.steps * steps), steps - done)
        self.is_fixed = True
        return replace(self.config, steps=steps, decay=decay, warmup=min(self.config.warmup, 2 * done))

    def _seconds_per_step(self, done: int) -> float:
        first, began = self._first or (0, 0.0)
        if done == first:
            return self.elapsed / max(1, done)
        return max(0.0, self.elapsed - began - self._evaluating) / (done - first)
