"""The one training loop: resumable, logged, the same on a CPU, a GPU or several processes."""

import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lantern.io import atomic_write

Config = TypeVar("Config")


@dataclass(frozen=True)
class LoopConfig:
    """How long and how to train. Learning rates belong to the task's optimizers; this only scales them.

    The scale rises linearly over `warmup` steps, stays at one, and falls linearly to zero over the last
    `decay` steps. Every `save_seconds` a checkpoint replaces the last one; the batch of a step is a pure
    function of (seed, step, rank), so a killed run goes on to the same weights on a CPU.
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

    def __post_init__(self) -> None:
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f'precision is "{self.precision}", wanted "bf16" or "fp32"')
        if self.steps < 1 or self.warmup < 0 or not 0 <= self.decay <= self.steps:
            raise ValueError(
                f"steps {self.steps}, warmup {self.warmup}, decay {self.decay}: wanted 0 <= decay <= steps"
            )

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
    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """The inputs of `forward` at a step: a pure function of its arguments."""

    @abstractmethod
    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
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


@dataclass
class Processes:
    """Who this process is among those that train together (torchrun's RANK and WORLD_SIZE)."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> "Processes":
        """Joins the others, if there are others."""
        rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        if count > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(rank, count, device)

    def wrap(self, task: Task) -> nn.Module:
        """The task, with gradients averaged over processes when there are several."""
        return nn.parallel.DistributedDataParallel(task, broadcast_buffers=False) if self.count > 1 else task


def save_checkpoint(
    path: Path, task: Task, optimizers: list[torch.optim.Optimizer], step: int, config: LoopConfig
) -> None:
    """Replaces the checkpoint at once or not at all."""
    state = {
        "task": task.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "step": step,
        "seed": config.seed,
    }
    with atomic_write(path) as temporary:
        torch.save(state, temporary)


def load_checkpoint(path: Path, task: Task, optimizers: list[torch.optim.Optimizer], config: LoopConfig) -> int:
    """Restores a run and returns the next step; 0 when there is nothing to restore."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state["seed"] != config.seed:
        raise ValueError(
            f"{path} was trained with seed {state['seed']}, got {config.seed}: use another folder or that seed"
        )
    rates = [[g["lr"] for g in o.param_groups] for o in optimizers]
    task.load_state_dict(state["task"])
    for optimizer, saved, rate in zip(optimizers, state["optimizers"], rates, strict=True):
        optimizer.load_state_dict(saved)
        for group, lr in zip(optimizer.param_groups, rate, strict=True):
            group["lr"] = lr
    return int(state["step"])


class Interrupt:
    """Turns SIGTERM and SIGINT into a flag, so that a step ends and is saved."""

    def __init__(self) -> None:
        self.raised = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise)

    def _raise(self, *_: object) -> None:
        self.raised = True


class Journal:
    """Progress bar on stderr, one JSON line a report in log.jsonl; silent on all processes but the first."""

    def __init__(self, out: Path, config: LoopConfig, start: int, *, quiet: bool) -> None:
        from tqdm import tqdm

        self.quiet = quiet
        self.path = out / "log.jsonl"
        is_hidden = quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=config.steps, initial=start, unit="step", dynamic_ncols=True, disable=is_hidden)
        self.began = time.monotonic()

    def report(self, step: int, figures: dict[str, float]) -> None:
        """Writes figures of a step."""
        if self.quiet:
            return
        self.bar.n = step
        self.bar.set_postfix({k: f"{v:.4g}" for k, v in figures.items()})
        line = {"step": step, "seconds": round(time.monotonic() - self.began, 1), **figures}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def take_step(
    model: nn.Module,
    task: Task,
    optimizers: list[torch.optim.Optimizer],
    config: LoopConfig,
    step: int,
    processes: Processes,
) -> dict[str, Tensor]:
    """One update. Dropout noise is seeded by the step, so that a resumed run repeats it."""
    torch.manual_seed(step_seed(config.seed, step, processes.rank))
    batch = task.batch(step, processes.rank, processes.device)
    with torch.autocast(processes.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        figures = model(*batch)
    figures["loss"].backward()
    if config.clip:
        figures["norm"] = nn.utils.clip_grad_norm_(task.parameters(), config.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    task.after_step(step)
    return {name: figure.detach() for name, figure in figures.items()}


def train(task: Task, config: LoopConfig, *, out: Path) -> None:
    """Trains a task to `config.steps`, going on from `out/checkpoint.pt` when it is there, then exports it to `out`.

    Writes log.jsonl, samples/, checkpoint.pt. SIGTERM or SIGINT saves and returns without exporting.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "samples").mkdir(exist_ok=True)
    processes, interrupt = Processes.from_environment(), Interrupt()
    for module in (task, *task.frozen):
        module.to(processes.device)
    optimizers = task.optimizers()
    peaks = [[g["lr"] for g in o.param_groups] for o in optimizers]
    start = load_checkpoint(out / "checkpoint.pt", task, optimizers, config)
    model = processes.wrap(task)
    is_first = processes.rank == 0
    journal = Journal(out, config, start, quiet=not is_first)
    saved = time.monotonic()
    for step in range(start, config.steps):
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * config.scale(step)
        task.train()
        figures = take_step(model, task, optimizers, config, step, processes)
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            journal.report(done, {k: float(v) for k, v in figures.items()})
        if is_first and (done % config.evaluate_every == 0 or done == config.steps):
            task.eval()
            with torch.no_grad():
                journal.report(done, {f"held_out_{k}": v for k, v in task.evaluate().items()})
                task.sample(out / "samples" / f"{done:07d}.png")
        if is_first and (time.monotonic() - saved > config.save_seconds or interrupt.raised or done == config.steps):
            save_checkpoint(out / "checkpoint.pt", task, optimizers, done, config)
            saved = time.monotonic()
        if interrupt.raised:
            return
    if is_first:
        task.eval()
        task.export(out)


def with_overrides(config: Config, **changes: object) -> Config:
    """A configuration with the given fields changed; None leaves a field as it is."""
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[type-var]
