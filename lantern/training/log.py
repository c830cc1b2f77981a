"""What a training run reports: a progress bar, log.jsonl, TensorBoard events and sheets of sample images."""

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


class TrainingLog:
    """Progress bar on stderr if that is a terminal, one JSON line per report in log.jsonl, events in `events/`.

    Only the first process writes. Without the package tensorboard (extra `train`) one line reports it and no events are
    written. A resumed run hides the events that the stopped run wrote after its checkpoint. `steps` is None as long as
    a timed run has not fixed their number.
    """

    def __init__(self, out: Path, *, steps: int | None, start: int, is_quiet: bool) -> None:
        from tqdm import tqdm

        self.is_quiet = is_quiet
        self.path = out / "log.jsonl"
        is_hidden = is_quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, disable=is_hidden)
        self.steps, self.start, self.began = steps, start, time.monotonic()
        self._events = None if is_quiet else self._open_events(out / "events")

    def report(self, step: int, figures: dict[str, float]) -> None:
        """Write figures of a step."""
        if self.is_quiet:
            return
        self.bar.set_postfix({k: f"{v:.4g}" for k, v in figures.items()}, refresh=False)
        self.bar.update(step - self.bar.n)
        spent = time.monotonic() - self.began
        left = None if self.steps is None else spent / max(1, step - self.start) * (self.steps - step)
        times = {"seconds": round(spent, 1), "seconds_left": left if left is None else round(left, 1)}
        self._write({"step": step, **times, **figures})
        if self._events is not None:
            for name, value in figures.items():
                self._events.add_scalar(name, value, step)

    def set_steps(self, step: int, lengths: dict[str, int]) -> None:
        """Write the number of steps that a timed run has fixed, and its other lengths."""
        self.steps = self.bar.total = lengths["steps"]
        if not self.is_quiet:
            self._write({"step": step, **lengths})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

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

    def _open_events(self, folder: Path) -> Any:
        if find_spec("tensorboard") is None:
            self.bar.write(f"no TensorBoard events; for them, {install_hint('train')}", file=sys.stderr)
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=self.start + 1 if self.start else None)


def save_sheet(pictures: UInt8[Tensor, "n 3 h w"], path: Path, *, columns: int) -> None:
    """Write a contact sheet as PNG, atomically."""
    rows = [images.to_image(picture) for picture in pictures.permute(0, 2, 3, 1).contiguous()]
    images.save_sheet(images.sheet(rows, columns=columns, gap=2, margin=2), path)
