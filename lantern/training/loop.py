"""The one training loop: resumable, logged, the same on a CPU, a GPU or several processes."""

import atexit
import dataclasses
import hashlib
import math
import signal
import time
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lantern.io import atomic_write
from lantern.training.average import Average
from lantern.training.journal import Journal

Config = TypeVar("Config")


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to train. Learning rates belong to the task's optimizers; this only scales them.

    The scale rises linearly over `warmup` steps, stays at one, and falls linearly to zero over the last
    `decay` steps. Every `save_seconds` a checkpoint replaces the last one; the batch of a step is a pure
    function of (seed, step, rank), so a killed run goes on to the same weights on a CPU. An update averages the
    gradients of `accumulate` batches; with `ema` above 0 held-out figures and what is exported are of an average of
    the weights that fades by it in every step.
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

    def __post_init__(self) -> None:
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f'precision is "{self.precision}", wanted "bf16" or "fp32"')
        if self.steps < 1 or self.warmup < 0 or not 0 <= self.decay <= self.steps:
            raise ValueError(
                f"steps {self.steps}, warmup {self.warmup}, decay {self.decay}: wanted 0 <= decay <= steps"
            )
        if self.accumulate < 1 or not 0 <= self.ema < 1:
            raise ValueError(f"accumulate {self.accumulate}, ema {self.ema}: wanted at least 1, and from 0 to below 1")

    def scale(self, step: int) -> float:
        """Factor on every learning rate at a step."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        fall = min(1.0, (self.steps - step) / max(1, self.decay))
        return rise * fall


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 32-bit seed (a CPU generator uses no more bits) for everything random in one process's step."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=4).digest())


class Task(nn.Module):
    """What the loop trains: modules as children, a loss in `forward`, and everything that differs between trainings.

    `frozen` are modules that a task only reads: they follow it to its device, and belong in no checkpoint.
    """

    frozen: tuple[nn.Module, ...] = ()

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, made once; their learning rates are the peak ones."""

    @abstractmethod
    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Any, ...]:
        """The inputs of `forward`: a pure function of its arguments. Accumulated batches count as steps here."""

    @abstractmethod
    def forward(self, *batch: Any) -> dict[str, Tensor]:
        """Scalars to log; the one called "loss" is minimised."""

    def after_step(self, step: int) -> None:
        """What a task updates without gradients."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, in the task's own terms."""
        return {}

    def sample(self, path: Path) -> None:
        """Writes a picture that shows where training stands."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes the trained component."""


def save_checkpoint(
    path: Path,
    task: Task,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    config: LoopConfig,
    average: Average | None,
) -> None:
    """Replaces the checkpoint at once or not at all."""
    state = {
        "task": task.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "average": average and average.state_dict(),
        "step": step,
        "seed": config.seed,
    }
    with atomic_write(path) as temporary:
        torch.save(state, temporary)


def load_checkpoint(
    path: Path, task: Task, optimizers: list[torch.optim.Optimizer], config: LoopConfig, average: Average | None
) -> int:
    """Restores a run and returns the next step; 0 when there is nothing to restore."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state["seed"] != config.seed:
        raise ValueError(
            f"{path} was trained with seed {state['seed']}, got {config.seed}: use another folder or that seed"
        )
    kept = state.get("average")
    if (kept is None) != (average is None):
        raise ValueError(f"{path} was trained {'without' if kept is None else 'with'} an average of weights: same ema?")
    rates = [[g["lr"] for g in o.param_groups] for o in optimizers]
    task.load_state_dict(state["task"])
    if average is not None:
        average.load_state_dict(kept)
    for optimizer, saved, rate in zip(optimizers, state["optimizers"], rates, strict=True):
        optimizer.load_state_dict(saved)
        for group, lr in zip(optimizer.param_groups, rate, strict=True):
            group["lr"] = lr
    return int(state["step"])


class Interrupt:
    """Turns SIGTERM and SIGINT into a flag while it is entered, so that a step ends and is saved."""

    def __init__(self) -> None:
        self.raised = False

    def __enter__(self) -> "Interrupt":
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._raise) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise(self, *_: object) -> None:
        self.raised = True

    def reaches(self, accelerator: Any) -> bool:
        """Whether any process was told to stop; all of them hear it after the same step."""
        if accelerator.num_processes == 1:
            return self.raised
        if self.raised:
            accelerator.set_trigger()
        return accelerator.check_trigger()


def start_accelerator(config: LoopConfig) -> Any:
    """Joins the processes that `torchrun` or `accelerate launch` started, if there are any; GPUs where there are some.

    What the config says of precision and accumulation counts, whatever the launcher was told.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    accelerator.gradient_accumulation_steps = config.accumulate
    if accelerator.num_processes > 1:  # a process that ends with its group's threads running may abort
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator


class Run:
    """A run from its first step, or from its checkpoint, to its last."""

    def __init__(self, task: Task, config: LoopConfig, out: Path) -> None:
        (out / "samples").mkdir(parents=True, exist_ok=True)
        self.task, self.config, self.out = task, config, out
        self.accelerator = start_accelerator(config)
        self.is_first = self.accelerator.is_main_process
        for module in (task, *task.frozen):
            module.to(self.accelerator.device)
        self.optimizers = task.optimizers()
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = Average(task, config.ema) if config.ema else None
        self.start = load_checkpoint(out / "checkpoint.pt", task, self.optimizers, config, self.average)
        self.model = self.accelerator.prepare_model(task)
        self.journal = Journal(out, steps=config.steps, start=self.start, is_quiet=not self.is_first)

    def go(self, interrupt: Interrupt) -> bool:
        """Takes all steps; False if it was told to stop, which it does after a step, with a checkpoint."""
        config, saved = self.config, time.monotonic()
        for done in range(self.start + 1, config.steps + 1):
            figures, is_last = self.take_step(done - 1), done == config.steps
            if done % config.log_every == 0 or is_last:
                self.report(done, {name: float(figure) for name, figure in figures.items()})
            if self.is_first and (done % config.evaluate_every == 0 or is_last):
                self.look(done)
            is_stopped = interrupt.reaches(self.accelerator)
            if self.is_first and (time.monotonic() - saved > config.save_seconds or is_stopped or is_last):
                self.save(done)
                saved = time.monotonic()
            if is_stopped:
                return False
        return True

    def take_step(self, step: int) -> dict[str, Tensor]:
        """One update. Dropout noise is seeded by the step, so that a resumed run repeats it."""
        accelerator, config, task = self.accelerator, self.config, self.task
        self._set_rates(config.scale(step))
        task.train()
        seen: list[dict[str, Tensor]] = []
        for number in range(step * config.accumulate, (step + 1) * config.accumulate):
            rank = accelerator.process_index
            torch.manual_seed(step_seed(config.seed, number, rank))
            batch = task.batch(number, rank, accelerator.device)
            with accelerator.accumulate(self.model):
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    figures = self.model(*batch)
                accelerator.backward(figures["loss"])
            seen.append({name: figure.detach() for name, figure in figures.items()})
        mean = {name: torch.stack([figures[name] for figures in seen]).mean(0) for name in seen[0]}
        if config.clip:
            mean["norm"] = accelerator.clip_grad_norm_(task.parameters(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        task.after_step(step)
        if self.average is not None:
            self.average.update(step)
        return mean

    def report(self, done: int, figures: dict[str, float]) -> None:
        """Figures of a step into the journal; RuntimeError if there is nothing to learn from them any more."""
        self.journal.report(done, figures)
        if not math.isfinite(figures["loss"]):
            raise RuntimeError(f"the loss became {figures['loss']} by step {done}: lower the rate, or use fp32")

    def look(self, done: int) -> None:
        """Held-out figures and a sample, of the averaged weights if there are any."""
        path = self.out / "samples" / f"{done:07d}.png"
        with self._final_weights(), torch.no_grad():
            self.journal.report(done, {f"held_out_{k}": v for k, v in self.task.evaluate().items()})
            self.task.sample(path)
        self.journal.show(done, path)

    def save(self, done: int) -> None:
        """Writes the checkpoint."""
        save_checkpoint(self.out / "checkpoint.pt", self.task, self.optimizers, done, self.config, self.average)

    def export(self) -> None:
        """Writes the trained component, of the averaged weights if there are any."""
        with self._final_weights():
            self.task.export(self.out)

    def _final_weights(self) -> AbstractContextManager[None]:
        self.task.eval()
        return self.average.in_place() if self.average is not None else nullcontext()

    def _set_rates(self, scale: float) -> None:
        for optimizer, rates in zip(self.optimizers, self.peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale


def train(task: Task, config: LoopConfig, *, out: Path) -> None:
    """Trains a task to `config.steps`, going on from `out/checkpoint.pt` when it is there, then exports it to `out`.

    Writes log.jsonl, events/, samples/, checkpoint.pt. SIGTERM or SIGINT saves and returns without exporting.
    """
    with Interrupt() as interrupt:
        run = Run(task, config, out)
        is_whole = run.go(interrupt)
        if run.is_first and is_whole:
            run.export()
        run.accelerator.wait_for_everyone()
        run.journal.close()


def with_overrides(config: Config, **changes: object) -> Config:
    """A configuration with the given fields changed; None leaves a field as it is."""
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[type-var]
