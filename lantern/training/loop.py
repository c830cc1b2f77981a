"""The one training loop: resumable, logged, the same on a CPU, a GPU or several processes."""

import atexit
import ctypes
import dataclasses
import hashlib
import json
import math
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lantern.core.config import check_least, check_number, install_hint, one_line
from lantern.core.io import (
    CONFIG_NAME,
    TRAINING_NAME,
    atomic_write,
    is_there,
    read_pickled,
    sha256_of,
    trained_steps,
    write_json,
    write_text,
)
from lantern.core.process import Stopped, Stopping
from lantern.generation.images import to_image

FEW = 200  # steps below which a timed training warns
MEASURED = 0.1  # share of the time after which it does
DIVERGED = "lower the rate, or use fp32, in this --out or another"
WEIGHTS = (".safetensors", ".bin")
MINUTE = 60.0  # seconds between lines where stderr is no terminal


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Length and schedule of a training. Learning rates belong to the task's optimizers; the loop scales them.

    The scale rises linearly over `warmup` steps, stays at one, and falls linearly to zero over the last `decay` steps.
    With `minutes` above 0 it follows the clock: after a share of this time the scale is that after the same share of
    `steps`, which is not their number then; the inputs of the task are prepared before the first step. `clip` bounds
    the norm of the gradients, 0 for no bound. Every `save_seconds` a checkpoint replaces the previous one; the batch of
    a step is a pure function of (seed, step, rank), so that a resumed run of given steps ends with the same weights on
    a CPU. An update averages the gradients of `accumulate` batches. With `ema` above 0, held-out figures and exported
    weights are those of an exponential moving average with this decay per step. ValueError for values out of range.
    """

    steps: int
    seed: int = 0
    warmup: int = 100
    decay: int = 0
    clip: float = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    save_seconds: float = 60.0
    log_every: int = 10
    evaluate_every: int = 500
    accumulate: int = 1
    ema: float = 0.0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        check_least(self, steps=1, warmup=0, clip=0, log_every=1, evaluate_every=1, accumulate=1, minutes=0)
        check_number("decay", self.decay, 0, self.steps)
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}, wanted from 0 to below 1")

    def scale(self, step: float) -> float:
        """Return the factor on every learning rate at a step."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        return rise * min(1.0, (self.steps - step) / max(1, self.decay))

    def with_length(
        self, *, steps: int | None = None, decay: int | None = None, minutes: float | None = None
    ) -> "LoopConfig":
        """Return the loop with options of the command line; a decay of more steps than there are is shortened.

        Without a GPU, bf16 becomes fp32 on a processor with AVX2 alone. ValueError if both steps and minutes are given.
        """
        if steps is not None and minutes is not None:
            raise ValueError("got --steps and --minutes: give one of them")
        length, fall = self.steps if steps is None else steps, self.decay if decay is None else decay
        if fall > length:
            print(f"decay is {fall} steps, more than the {length} of this training: set to {length}", file=sys.stderr)
            fall = length
        minutes = minutes or (self.minutes if steps is None else 0.0)
        changed = dataclasses.replace(self, steps=length, decay=fall, minutes=minutes)
        is_slow = not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"
        if self.precision == "fp32" or not is_slow:
            return changed
        print("precision is bf16, which is slower than fp32 on this processor: set to fp32", file=sys.stderr)
        return dataclasses.replace(changed, precision="fp32")


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a 32-bit seed (a CPU generator uses no more bits) for everything random in one process's step."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=4).digest())


def step_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """Return the generator of everything random in one process's batch."""
    return torch.Generator().manual_seed(step_seed(seed, step, rank))


class Task(nn.Module):
    """What the loop trains: modules as children, a loss in `forward`, and everything that differs between trainings.

    `config` are its settings, with `lr` and `weight_decay` unless it has `optimizers` of its own. `frozen` are modules
    that a task only reads: they move to the task's device and are in no checkpoint. `batch_tokens` is the number of
    tokens in a batch, 0 where there are none. `best` names the held-out figure by which weights are exported, those
    with the largest; the last ones if it is "". `judged_by` are settings that change the figure.
    """

    config: Any
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    frozen: tuple[nn.Module, ...] = ()
    batch_tokens: int = 0
    best: ClassVar[str] = ""
    judged_by: str = ""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers, called once, with the peak learning rates: AdamW over what has gradients."""
        config, trained = self.config, [p for p in self.parameters() if p.requires_grad]
        return [torch.optim.AdamW(trained, lr=config.lr, betas=self.betas, weight_decay=config.weight_decay)]

    @abstractmethod
    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Any, ...]:
        """Return the inputs of `forward` on a device, a pure function of the arguments; called in another thread.

        Accumulated batches count as steps here.
        """

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


def save_sheet(pictures: UInt8[Tensor, "n 3 h w"], path: Path, *, columns: int) -> None:
    """Write a contact sheet as a small PNG, atomically."""
    from torchvision.utils import make_grid

    sheet = make_grid(pictures, columns, pad_value=255)
    with atomic_write(path) as temporary:
        to_image(sheet.permute(1, 2, 0)).save(temporary, format="PNG", optimize=True)


def keep_freed_memory() -> bool:
    """Let glibc reuse freed blocks of up to 1 GiB; return False where the C library has no such setting.

    By default large blocks return to the system when they are freed, and each page of a new one costs a page fault: a
    large part of the CPU time of convolutions. The process keeps its largest memory use until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    mmap_threshold, trim_threshold = (-3, 1 << 30), (-1, (1 << 31) - 1)
    return mallopt is not None and all(mallopt(*setting) for setting in (mmap_threshold, trim_threshold))


@dataclasses.dataclass(frozen=True)
class Best:
    """Weights of a step, on the CPU, their held-out figure and the task's `judged_by`."""

    value: float
    judged_by: str
    step: int
    weights: list[Tensor]


class TrainingLog:
    """Progress on stderr, one JSON line per report in log.jsonl, events in `events/`; only the first process writes.

    On a terminal progress is a bar, elsewhere a line a minute. A resumed run hides events, and removes lines, that the
    stopped run wrote after its checkpoint.
    """

    def __init__(self, run: "Run") -> None:
        from tqdm import tqdm

        self.run, self.first_step, self.first_share, config = run, run.done, run.share, run.config
        self.began = self.spoken = time.monotonic()
        self.steps = None if config.minutes else config.steps
        self.tokens = run.task.batch_tokens * config.accumulate * run.accelerator.num_processes
        is_hidden = not run.is_first or not sys.stderr.isatty()
        self.bar = tqdm(initial=run.done, total=self.steps, unit="step", dynamic_ncols=True, disable=is_hidden)
        self._events: Any = None
        if run.is_first and (path := run.out / "log.jsonl").exists():
            lines = path.read_text().splitlines(keepends=True)  # the last one may be cut short
            whole = (line for line in lines if line.endswith("}\n"))
            write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= run.done))
        if run.is_first and find_spec("tensorboard") is None:
            print(f"no TensorBoard events; for them, {install_hint('train')}", file=sys.stderr)
        elif run.is_first:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run.out / "events"), purge_step=run.done + 1)

    def speak(self, figures: dict[str, Tensor], *, is_last: bool) -> None:
        """Advance the bar, or print a line if the last one is a minute old or this step is the last."""
        now, step = time.monotonic(), self.run.done
        if not self.bar.disable:
            self.bar.update(step - self.bar.n)
        elif self.run.is_first and (is_last or now - self.spoken >= MINUTE):
            self.spoken, rate = now, (step - self.first_step) / max(now - self.began, 1e-9)
            of = f"step {step} of {self.steps}" if self.steps else f"step {step}"
            parts = [f"{of}: loss {float(figures['loss']):.4g}", f"{rate:.3g} steps/s"]
            parts += [f"{rate * self.tokens:,.0f} tokens/s"] if self.tokens else []
            print(", ".join([*parts, f"{self._left() / 60:.1f} minutes left"]), file=sys.stderr, flush=True)

    def report(self, figures: dict[str, float]) -> None:
        """Write figures of a step."""
        if not self.run.is_first:
            return
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        seconds = {"seconds": round(time.monotonic() - self.began, 1), "seconds_left": round(self._left(), 1)}
        with (self.run.out / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.run.done, **seconds, **figures}) + "\n")
        if self._events is not None:
            for name, value in figures.items():
                self._events.add_scalar(name, value, self.run.done)

    def show(self, picture: Path) -> None:
        """Add a sample image to the events, if the task wrote one."""
        if self._events is not None and picture.exists():
            import numpy as np
            from PIL import Image

            with Image.open(picture) as image:
                self._events.add_image("sample", np.asarray(image.convert("RGB")), self.run.done, dataformats="HWC")

    def close(self) -> None:
        """End the bar and the events."""
        self.bar.close()
        if self._events is not None:
            self._events.close()

    def _left(self) -> float:
        """Return the remaining seconds."""
        share = self.run.share
        return (time.monotonic() - self.began) * (1 - share) / max(share - self.first_share, 1e-9)


class Run:
    """A training run from its first step, or from its checkpoint, to its last."""

    def __init__(self, task: Task, config: LoopConfig, out: Path, init: Path | None, source: str) -> None:
        from accelerate import Accelerator

        self.task, self.config, self.out, self.init, self.source = task, config, out, init, source
        # precision and accumulation are those of the config; the launcher's settings are ignored
        accelerator = self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
        accelerator.gradient_accumulation_steps = config.accumulate
        if accelerator.num_processes > 1:  # a process that ends with its group's threads running may abort
            atexit.register(accelerator.state.destroy_process_group)
        self.is_first = accelerator.is_main_process
        (out / "samples").mkdir(parents=True, exist_ok=True)
        for module in (task, *task.frozen):
            module.to(accelerator.device)
        self.optimizers = task.optimizers()
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.trained = nn.ParameterList(p for p in task.parameters() if p.requires_grad)
        self.average = AveragedModel(self.trained, multi_avg_fn=self._move_means) if config.ema else None
        if self.average is not None:
            self.average.n_averaged.fill_(1)  # the initial weights are the first ones
        self.best: Best | None = None
        self.done, seconds = self._load()
        self.began = time.monotonic() - seconds
        self.place = self._place(seconds)
        self.model = accelerator.prepare_model(task)
        self.log = TrainingLog(self)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead = self._begin_batch(self.done * config.accumulate)

    @property
    def elapsed(self) -> float:
        """Seconds since the training began, those before an interruption included."""
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """The part of the training that is done."""
        return min(1.0, self.place / self.config.steps)

    def _place(self, seconds: float) -> float:
        """Return the step of the schedule after the steps that are done, or after a time in a timed training."""
        config = self.config
        return config.steps * seconds / (60 * config.minutes) if config.minutes else self.done

    def _begin_batch(self, number: int) -> Future[Any]:
        """Build a batch in the background thread, one ahead of the steps."""
        return self.thread.submit(self.task.batch, number, self.accelerator.process_index, self.accelerator.device)

    def _move_means(self, means: Any, weights: Any, count: Any) -> None:
        """Set a := d a + (1 - d) w, d = min(ema, n / (9 + n)) after n steps, so that early weights fade."""
        share = 1 - min(self.config.ema, int(count) / (9 + int(count)))
        for mean, weight in zip(means, weights, strict=True):
            mean.lerp_(weight, share)

    def _load(self) -> tuple[int, float]:
        """Restore the checkpoint; return the number of steps that are done and their seconds, 0 if there is none.

        ValueError for a damaged file and for a checkpoint of another training.
        """
        path, config, advice = self.out / "checkpoint.pt", self.config, "remove it or use another folder"
        if not is_there(path):
            return 0, 0.0
        try:
            state = read_pickled(path)
        except ValueError as error:
            raise ValueError(f"{error}: {advice}") from error
        names = {"task", "optimizers", "average", "step", "seed", "seconds", "source"}
        if not isinstance(state, dict) or names - set(state):
            raise ValueError(f"{path} is no checkpoint of a training: {advice}")
        why = ""
        if state["seed"] != config.seed:
            why = f"with seed {state['seed']}, got {config.seed}: use another folder or that seed"
        elif not config.minutes and state["step"] > config.steps:
            why = f"for {state['step']} steps, got {config.steps}: give more --steps, or another --out"
        elif state["source"] != self.source:
            why = "on other data, for another target or from another --init: use another folder, or those"
        elif (had_average := state["average"] is not None) != bool(config.ema):
            why = f"with{'' if had_average else 'out'} an average of weights: set ema in the config as before"
        if why:
            raise ValueError(f"{path} was trained {why}")
        try:
            self.task.load_state_dict(state["task"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                groups = zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
                own = [group | {"params": old["params"]} for group, old in groups]  # the config may have changed
                optimizer.load_state_dict(saved | {"param_groups": own})
            if (best := state.get("best")) and best["judged_by"] == self.task.judged_by:
                self.best = Best(**best)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is of another training ({one_line(error)[:160]}): {advice}") from error
        return int(state["step"]), float(state["seconds"])

    def go(self, stopping: Stopping) -> bool:
        """Run all steps. After a signal, save a checkpoint at the end of the step and return False."""
        config, saved = self.config, time.monotonic()
        while self.place < config.steps:
            figures = self.take_step(self.done)
            self.done += 1
            is_stopped = self._advance(stopping)
            is_last, done = self.place >= config.steps, self.done
            self.log.speak(figures, is_last=is_last)
            if done % config.log_every == 0 or is_last:
                self.log.report(found := {name: float(figure) for name, figure in figures.items()})
                if not math.isfinite(found["loss"]):
                    raise FloatingPointError(f"the loss became {found['loss']} by step {done}: {DIVERGED}")
            if self.is_first and (done % config.evaluate_every == 0 or is_last):
                self.measure()
            if self.is_first and (time.monotonic() - saved > config.save_seconds or is_stopped or is_last):
                self.save()
                saved = time.monotonic()
            if is_stopped:
                return False
        return True

    def take_step(self, step: int) -> dict[str, Tensor]:
        """Make one update. Dropout noise is seeded by the step, so that a resumed run repeats it."""
        accelerator, config, task = self.accelerator, self.config, self.task
        task.train()
        seen: list[dict[str, Tensor]] = []
        for number in range(step * config.accumulate, (step + 1) * config.accumulate):
            batch, self.ahead = self.ahead.result(), self._begin_batch(number + 1)
            torch.manual_seed(step_seed(config.seed, number, accelerator.process_index))
            with accelerator.accumulate(self.model):
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    figures = self.model(*batch)
                accelerator.backward(figures["loss"])
            seen.append({name: figure.detach() for name, figure in figures.items()})
        mean = {name: torch.stack([figures[name] for figures in seen]).mean(0) for name in seen[0]}
        if config.clip:
            mean["norm"] = cast(Tensor, accelerator.clip_grad_norm_(task.parameters(), config.clip))
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * config.scale(self.place)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        task.after_step(step)
        if self.average is not None:
            self.average.update_parameters(self.trained)
        return mean

    def _advance(self, stopping: Stopping) -> bool:
        """Set the place in the schedule after a step; return whether any process received a signal.

        All processes agree on both. A timed training that will have few steps warns once.
        """
        seconds, signals, config = self.elapsed, float(stopping.is_requested), self.config
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([seconds, signals], dtype=torch.float64, device=self.accelerator.device)
            seconds, signals = cast(Tensor, self.accelerator.reduce(mine, "mean")).tolist()
        before, self.place = self.place, self._place(seconds)
        if config.minutes and before < MEASURED * config.steps <= self.place and self.is_first:
            steps = max(self.done, int(self.done * config.steps / self.place))
            if steps < FEW:
                advice = "give more --minutes, or take a smaller model or batch"
                print(f"warning: the time suffices for {steps} steps, fewer than {FEW}: {advice}", file=sys.stderr)
        return signals > 0

    def measure(self) -> None:
        """Log held-out figures and a sample, of the averaged weights if there are any."""
        path = self.out / "samples" / f"{self.done:07d}.png"
        with self._final_weights(), torch.no_grad():
            figures = self.task.evaluate()
            self.log.report({f"held_out_{name}": value for name, value in figures.items()})
            if self.task.best and figures[self.task.best] > (self.best.value if self.best else -math.inf):
                weights = [weight.detach().to("cpu", copy=True) for weight in self.trained]
                self.best = Best(figures[self.task.best], self.task.judged_by, self.done, weights)
            self.task.sample(path)
        self.log.show(path)

    def save(self) -> None:
        """Replace the checkpoint atomically; FloatingPointError for weights that no run could resume from."""
        if not all(bool(weight.isfinite().all()) for weight in self.trained):
            raise FloatingPointError(f"weights became NaN or infinite by step {self.done}: {DIVERGED}")
        state = {
            "task": self.task.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average and self.average.state_dict(),
            "best": self.best and vars(self.best),
            "step": self.done,
            "seed": self.config.seed,
            "source": self.source,
            "seconds": self.elapsed,
        }
        with atomic_write(self.out / "checkpoint.pt") as temporary:
            try:
                with temporary.open("wb") as file:
                    torch.save(state, file)
            except RuntimeError as error:  # torch's own, behind that of a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def export(self) -> None:
        """Write the trained component, of the best weights, the averaged or the last ones, and the schedule as run."""
        with self._final_weights(self.best):
            self.task.export(self.out)
        decay = round(self.config.decay * self.done / self.config.steps)
        loop = dataclasses.replace(self.config, steps=self.done, decay=decay)
        before = trained_steps(self.init) if self.init else 0
        facts: dict[str, Any] = {"loop": dataclasses.asdict(loop), "seconds": round(self.elapsed, 1)}
        if self.best:
            facts["best"] = {"step": self.best.step, f"held_out_{self.task.best}": self.best.value}
        if before is not None:
            facts["steps"] = before + (self.best.step if self.best else self.done)
        # the component keeps it when it moves into a model's folder
        for folder in (self.out, *(path.parent for path in self.out.glob(f"*/{CONFIG_NAME}"))):
            write_json(folder / TRAINING_NAME, facts)

    @contextmanager
    def _final_weights(self, best: Best | None = None) -> Iterator[None]:
        """Let the task be used by the caller alone, in eval mode, with these weights or the averaged ones, if any."""
        wait([self.ahead])
        self.task.eval()
        own = [weight.data for weight in self.trained]
        final = best.weights if best else (self.average or self.trained).parameters()
        for weight, mean in zip(self.trained, final, strict=True):
            weight.data = mean.data.to(weight.device)
        try:
            yield
        finally:
            for weight, data in zip(self.trained, own, strict=True):
                weight.data = data


def run_loop(task: Task, config: LoopConfig, *, out: Path, init: Path | None = None, source: str = "") -> None:
    """Train a task to `config.steps`, resuming from `out/checkpoint.pt` if it exists, then export it to `out`.

    Writes log.jsonl, events/, samples/, checkpoint.pt and training.json: the schedule as it was run, and the steps of
    the exported weights, those of `init` included, the component that the training starts from (if it has recorded
    them). SIGTERM, SIGINT or SIGHUP ends the run after a step with a checkpoint and without an export, and raises
    Stopped. `source` names what the task learns from; a checkpoint of another is refused.
    """
    with Stopping() as stopping, stopping.shield():
        begun_from = () if init is None else sorted(path for path in init.iterdir() if path.suffix in WEIGHTS)
        run = Run(task, config, out, init, " ".join([source, *map(sha256_of, begun_from)]))
        if run.is_first and run.place >= config.steps:
            is_old = (out / TRAINING_NAME).exists()
            what = "give more --steps, or another --out" if is_old else "they are exported"
            print(f"{out}: all steps are done already: {what}", file=sys.stderr)
        try:
            is_complete = run.go(stopping)
            if run.is_first and is_complete:
                run.export()
            run.accelerator.wait_for_everyone()
        finally:
            run.thread.shutdown(cancel_futures=True)
            run.log.close()
    if not is_complete:  # another process received the signal
        raise Stopped(signal.SIGTERM)
