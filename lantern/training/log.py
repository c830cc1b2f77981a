"""What a training run reports: a bar or a line a minute, log.jsonl, TensorBoard events and sheets of sample images."""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from lantern.core.config import install_hint
from lantern.generation import images

MINUTE = 60.0  # seconds between lines where stderr is no terminal


class TrainingLog:
    """Progress on stderr, one JSON line per report in log.jsonl, events in `events/`; only the first process writes.

    On a terminal progress is a bar, elsewhere a line a minute. A resumed run hides events that the stopped run wrote
    after its checkpoint. `share` is that of the training which is done, `tokens` are those of a step, and `steps` is
    None for a timed run.
    """

    def __init__(self, out: Path, *, start: int, share: float, steps: int | None, tokens: int, is_quiet: bool) -> None:
        from tqdm import tqdm

        self.path, self.start, self.tokens, self.is_quiet = out / "log.jsonl", start, tokens, is_quiet
        self.share, self.steps = share, steps
        self.began = self.spoken = time.monotonic()
        is_hidden = is_quiet or not sys.stderr.isatty()
        self.bar = tqdm(initial=start, total=steps, unit="step", dynamic_ncols=True, disable=is_hidden)
        self._events = None if is_quiet else self._open_events(out / "events")

    def speak(self, step: int, share: float, figures: dict[str, Tensor], *, is_last: bool) -> None:
        """Advance the bar, or print a line if the last one is a minute old or this step is the last."""
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.update(step - self.bar.n)
        elif not self.is_quiet and (is_last or now - self.spoken >= MINUTE):
            self.spoken, rate, left = now, (step - self.start) / max(now - self.began, 1e-9), self._left(share)
            of = f"step {step} of {self.steps}" if self.steps else f"step {step}"
            parts = [f"{of}: loss {float(figures['loss']):.4g}", f"{rate:.3g} steps/s"]
            parts += [f"{rate * self.tokens:,.0f} tokens/s"] if self.tokens else []
            print(", ".join([*parts, f"{left / 60:.1f} minutes left"]), file=sys.stderr, flush=True)

    def report(self, step: int, share: float, figures: dict[str, float]) -> None:
        """Write figures of a step."""
        if self.is_quiet:
            return
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        spent, left = time.monotonic() - self.began, self._left(share)
        seconds = {"seconds": round(spent, 1), "seconds_left": round(left, 1)}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **seconds, **figures}) + "\n")
        if self._events is not None:
            for name, value in figures.items():
                self._events.add_scalar(name, value, step)

    def show(self, step: int, picture: Path) -> None:
        """Add a sample image to the events, if the task wrote one."""
        if self._events is None or not picture.exists():
            return
        import numpy as np
        from PIL import Image

        with Image.open(picture) as image:
            self._events.add_image("sample", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """End the bar and the events."""
        self.bar.close()
        if self._events is not None:
            self._events.close()

    def _left(self, share: float) -> float:
        """Return the remaining seconds."""
        return (time.monotonic() - self.began) * (1 - share) / max(share - self.share, 1e-9)

    def _open_events(self, folder: Path) -> Any:
        if find_spec("tensorboard") is None:
            print(f"no TensorBoard events; for them, {install_hint('train')}", file=sys.stderr)
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=self.start + 1 if self.start else None)


def save_sheet(pictures: UInt8[Tensor, "n 3 h w"], path: Path, *, columns: int) -> None:
    """Write a contact sheet as PNG, atomically."""
    rows = [images.to_image(picture) for picture in pictures.permute(0, 2, 3, 1).contiguous()]
    images.save_sheet(images.sheet(rows, columns=columns, gap=2, margin=2), path)
