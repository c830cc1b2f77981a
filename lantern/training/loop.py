"""The one training loop: resumable, logged, the same on a CPU, a GPU or several processes."""

import atexit
import dataclasses
import hashlib
import math
import signal
import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern.core.config import one_line
from lantern.core.io import CONFIG_NAME, TRAINING_NAME, atomic_write, is_there, read_pickled, write_json
from lantern.core.signals import Stopped, Stopping
from lantern.training.log import TrainingLog
from lantern.training.schedule import LoopConfig, TimePlan

__all__ = ["LoopConfig", "Task", "WeightAverage", "step_seed", "train"]


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a 32-bit seed (a CPU generator uses no more bits) for everything random in one process's step."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=4).digest())


class Task(nn.Module):
    """What the loop trains: modules as children, a loss in `forward`, and everything that differs between trainings.

    `frozen` are modules that a task only reads: they move to the task's device and are in no checkpoint. With
    `has_background_batches`, `batch` runs in a thread, on the CPU, while the previous step is computed.
    """

    frozen: tuple[nn.Module, ...] = ()
    has_background_batches: bool = True

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers, called once; their learning rates are the peak ones."""

    @abstractmethod
    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Any, ...]:
        """Return the inputs of `forward`, a pure function of the arguments. Accumulated batches count as steps here."""

    @abstractmethod
    def forward(self, *batch: Any) -> dict[str, Tensor]:
        """Return scalars to log; the one called "loss" is minimised."""

    def after_step(self, step: int) -> None:
        """Update what has no gradients."""

    def evaluate(self) -> dict[str, float]:
        """Return figures on held-out data."""
        return {}

    def sample(self, path: Path) -> None:
        """Write an image that shows the state of training, or nothing."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained component."""


class WeightAverage:
    """Exponential moving average of the trained weights.

    a := d a + (1 - d) w after every step, d = min(decay, (1 + step) / (10 + step)), so that early weights fade.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._means = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, mean in self._means.items():
            mean.lerp_(self._weights[name], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the module the averages as its weights for the time of the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            weight.data, self._means[name] = self._means[name], weight.data

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of the weights."""
        return dict(self._means)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load averages of the same weights. ValueError for other weights."""
        if set(state) != set(self._means):
            raise ValueError(f"the checkpoint averages {len(state)} weights, wanted {len(self._means)}: same config?")
        for name, mean in self._means.items():
            mean.copy_(state[name])


def load_checkpoint(
    path: Path, task: Task, optimizers: list[torch.optim.Optimizer], config: LoopConfig, average: WeightAverage | None
) -> tuple[int, dict[str, float] | None]:
    """Restore a run; return the next step, 0 if there is no checkpoint, and the plan of a timed run.

    ValueError for a damaged file and for a checkpoint of another training.
    """
    if not is_there(path):
        return 0, None
    try:
        state = read_pickled(path)
    except ValueError as error:
        raise ValueError(f"{error}: remove it or use another folder") from error
    if not isinstance(state, dict) or {"task", "optimizers", "step", "seed"} - set(state):
        raise ValueError(f"{path} is no checkpoint of a training: remove it or use another folder")
    if state["seed"] != config.seed:
        raise ValueError(
            f"{path} was trained with seed {state['seed']}, got {config.seed}: use another folder or that seed"
        )
    means = state.get("average")
    if (means is None) != (average is None):
        was = "without" if means is None else "with"
        raise ValueError(f"{path} was trained {was} an average of weights: set ema in the config as before")
    rates = [[g["lr"] for g in o.param_groups] for o in optimizers]
    try:
        task.load_state_dict(state["task"])
        if average is not None and means is not None:
            average.load_state_dict(means)
        for optimizer, saved, rate in zip(optimizers, state["optimizers"], rates, strict=True):
            optimizer.load_state_dict(saved)
            for group, lr in zip(optimizer.param_groups, rate, strict=True):
                group["lr"] = lr
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is of another training ({one_line(error)[:160]}): remove it or use another folder"
        ) from error
    return int(state["step"]), state.get("plan")


def check_accelerate() -> None:
    """Raise ModuleNotFoundError if the package accelerate, of the extra `train`, is missing."""
    if find_spec("accelerate") is None:
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")


def moved(value: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Return a batch on a device, or with `pin` in pinned memory: tensors in tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return value.pin_memory() if pin else value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device, pin=pin) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, device, pin=pin) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{name: moved(item, device, pin=pin) for name, item in fields.items()})
    return value


class Batches:
    """Batches of one process in order, built in a background thread one ahead; in pinned memory for a GPU."""

    def __init__(self, task: Task, rank: int, device: torch.device) -> None:
        self._task, self._rank, self._device = task, rank, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches") if task.has_background_batches else None
        self._ahead: tuple[int, Future[Any]] | None = None

    def get(self, number: int) -> Any:
        """Return batch `number` on the device and begin with the next one."""
        if self._thread is None:
            return self._task.batch(number, self._rank, self._device)
        ahead = self._ahead if self._ahead and self._ahead[0] == number else self._begin(number)
        batch = ahead[1].result()
        self._ahead = self._begin(number + 1)
        return moved(batch, self._device)

    def wait(self) -> None:
        """Wait until the thread is idle, so that the task can be used by the caller alone."""
        if self._ahead is not None:
            self._ahead[1].exception()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, number: int) -> tuple[int, Future[Any]]:
        assert self._thread is not None
        return number, self._thread.submit(self._build, number)

    def _build(self, number: int) -> Any:
        batch = self._task.batch(number, self._rank, torch.device("cpu"))
        return moved(batch, self._device, pin=True) if self._device.type == "cuda" else batch


def start_accelerator(config: LoopConfig) -> Any:
    """Join the processes that `torchrun` or `accelerate launch` started, if any; use GPUs if there are some.

    Precision and accumulation are those of the config; the launcher's settings are ignored.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    accelerator.gradient_accumulation_steps = config.accumulate
    if accelerator.num_processes > 1:  # a process that ends with its group's threads running may abort
        atexit.register(accelerator.state.destroy_process_group)
    return accelerator


class Run:
    """A training run from its first step, or from its checkpoint, to its last."""

    def __init__(self, task: Task, config: LoopConfig, out: Path) -> None:
        self.task, self.config, self.out = task, config, out
        self.accelerator = start_accelerator(config)
        (out / "samples").mkdir(parents=True, exist_ok=True)
        self.is_first = self.accelerator.is_main_process
        for module in (task, *task.frozen):
            module.to(self.accelerator.device)
        self.optimizers = task.optimizers()
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = WeightAverage(task, config.ema) if config.ema else None
        self.start, plan = load_checkpoint(out / "checkpoint.pt", task, self.optimizers, config, self.average)
        self.plan = TimePlan(config, spent=plan["seconds"] if plan else 0.0)
        self.schedule = self._first_schedule(plan)
        self.model = self.accelerator.prepare_model(task)
        steps = self.schedule.steps if not config.minutes or self.plan.is_fixed else None
        self.log = TrainingLog(out, steps=steps, start=self.start, is_quiet=not self.is_first)
        self.batches = Batches(task, self.accelerator.process_index, self.accelerator.device)

    def _first_schedule(self, plan: dict[str, float] | None) -> LoopConfig:
        """Return the config's schedule, that of the checkpoint of a timed run, or one of unknown length."""
        if not self.config.minutes:
            return self.config
        if plan is None or plan["minutes"] != self.config.minutes or not plan["steps"]:
            return self.plan.open_schedule
        self.plan.is_fixed = True
        return dataclasses.replace(self.config, **{name: int(plan[name]) for name in self.config.lengths})

    def go(self, stopping: Stopping) -> bool:
        """Run all steps. After a signal, save a checkpoint at the end of the step and return False."""
        config, saved, done = self.config, time.monotonic(), self.start
        while done < self.schedule.steps:
            figures = self.take_step(done)
            done += 1
            self._fit_time(done)
            is_last = done >= self.schedule.steps
            if done % config.log_every == 0 or is_last:
                self.report(done, {name: float(figure) for name, figure in figures.items()})
            if self.is_first and (done % config.evaluate_every == 0 or is_last):
                self.measure(done)
            is_stopped = self._is_stopped(stopping)
            if self.is_first and (time.monotonic() - saved > config.save_seconds or is_stopped or is_last):
                self.save(done)
                saved = time.monotonic()
            if is_stopped:
                return False
        return True

    def _fit_time(self, done: int) -> None:
        """Fix the steps of a timed run when its rate is known, and shorten the rest if it is late at the decay."""
        if not self.config.minutes:
            return
        plan, decay_begins = self.plan, done == self.schedule.steps - self.schedule.decay
        plan.count_step(done)
        if plan.is_fixed and not decay_begins:
            return
        lengths: list[Any] = [None]
        if self.is_first:
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            if plan.is_due(done) or (plan.is_fixed and decay_begins and plan.is_late(done, self.schedule)):
                seconds = self.measure(done) if not plan.is_fixed else 0.0
                lengths = [plan.fixed(done, seconds).lengths]
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(lengths)
        if lengths[0] is not None:
            plan.is_fixed = True
            self.schedule = dataclasses.replace(self.config, **lengths[0])
            self.log.set_steps(done, lengths[0])

    def _is_stopped(self, stopping: Stopping) -> bool:
        """Return whether any process received a signal; all of them stop after the same step."""
        if self.accelerator.num_processes == 1:
            return stopping.is_requested
        if stopping.is_requested:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()

    def take_step(self, step: int) -> dict[str, Tensor]:
        """Make one update. Dropout noise is seeded by the step, so that a resumed run repeats it."""
        accelerator, config, task = self.accelerator, self.config, self.task
        self._set_rates(self.schedule.scale(step))
        task.train()
        seen: list[dict[str, Tensor]] = []
        for number in range(step * config.accumulate, (step + 1) * config.accumulate):
            batch = self.batches.get(number)
            torch.manual_seed(step_seed(config.seed, number, accelerator.process_index))
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
        """Log figures of a step; RuntimeError if the loss is not finite."""
        self.log.report(done, figures)
        if not math.isfinite(figures["loss"]):
            raise RuntimeError(f"the loss became {figures['loss']} by step {done}: lower the rate, or use fp32")

    def measure(self, done: int) -> float:
        """Log held-out figures and a sample, of the averaged weights if there are any; return the seconds it took."""
        began, path = time.monotonic(), self.out / "samples" / f"{done:07d}.png"
        self.batches.wait()
        with self._final_weights(), torch.no_grad():
            self.log.report(done, {f"held_out_{k}": v for k, v in self.task.evaluate().items()})
            self.task.sample(path)
        self.log.show(done, path)
        seconds = time.monotonic() - began
        self.plan.count_evaluation(seconds)
        return seconds

    def save(self, done: int) -> None:
        """Replace the checkpoint atomically."""
        plan: dict[str, float] | None = None  # the time spent and the fixed steps of a timed run
        if self.config.minutes:
            lengths = self.schedule.lengths
            lengths["steps"] *= self.plan.is_fixed
            plan = {"seconds": self.plan.elapsed, "minutes": self.config.minutes, **lengths}
        state = {
            "task": self.task.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average and self.average.state_dict(),
            "step": done,
            "seed": self.config.seed,
            "plan": plan,
        }
        with atomic_write(self.out / "checkpoint.pt") as temporary:
            torch.save(state, temporary)

    def export(self) -> None:
        """Write the trained component, of the averaged weights if there are any, and the schedule as it was run."""
        self.batches.wait()
        with self._final_weights():
            self.task.export(self.out)
        loop = dataclasses.asdict(self.schedule)
        facts = {"loop": loop, "seconds": round(self.plan.elapsed, 1)}
        # the component keeps it when it moves into a model's folder
        for folder in (self.out, *(path.parent for path in self.out.glob(f"*/{CONFIG_NAME}"))):
            write_json(folder / TRAINING_NAME, facts)

    def _final_weights(self) -> AbstractContextManager[None]:
        self.task.eval()
        return self.average.in_place() if self.average is not None else nullcontext()

    def _set_rates(self, scale: float) -> None:
        for optimizer, rates in zip(self.optimizers, self.peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale


def train(task: Task, config: LoopConfig, *, out: Path) -> None:
    """Train a task to `config.steps`, resuming from `out/checkpoint.pt` if it exists, then export it to `out`.

    Writes log.jsonl, events/, samples/, checkpoint.pt and training.json (the schedule as it was run). SIGTERM, SIGINT
    or SIGHUP ends the run after a step with a checkpoint and without an export, and raises Stopped.
    """
    with Stopping() as stopping, stopping.shield():
        run = Run(task, config, out)
        try:
            is_complete = run.go(stopping)
            if run.is_first and is_complete:
                run.export()
            run.accelerator.wait_for_everyone()
        finally:
            run.batches.close()
            run.log.close()
    if not is_complete:  # another process received the signal
        raise Stopped(signal.SIGTERM)
