"""Where the seconds of a batch go."""

import time

import torch


class Clock:
    """Seconds by phase, waiting for the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under `phase`."""
        if self._is_cuda:
            torch.cuda.synchronize()  # sync
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
