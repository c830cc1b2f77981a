"""What is counted while a generation runs: verdicts, NaN, and the time of each phase."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from math import exp, lgamma, log

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import TreeShape, Verdict


class StepSums:
    """Sums over the steps of each image; the fields are those of `Generation`.

    Verdicts are kept, a few numbers each, and added at the end; an engine that runs whole steps adds to the sums
    itself. Tokens past the end of the image are not counted.
    """

    def __init__(self, images: int, depth: int, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.steps = torch.ones(images, dtype=torch.long, device=device)  # that over the prompt
        self.accepted, self.reached = torch.zeros(2, images, depth, dtype=torch.long, device=device).unbind()
        # in fp64, in which the sum of a few hundred numbers hardly depends on its order
        zeros = torch.zeros(4, images, dtype=torch.float64, device=device)
        self.relaxed, self.variation, self.distance, self.excess = zeros.unbind()
        self.largest = torch.zeros(images, dtype=torch.float32, device=device)
        self.has_distance = self.is_bounded = False
        self._entries: list[tuple[TreeShape, slice, Verdict, Tensor]] = []

    def enter(self, shape: TreeShape, verdict: Verdict, start: Int[Tensor, " b"], images: slice = slice(None)) -> None:
        """Record a step whose first new token is number `start` of its image, of these images of a batch."""
        # Samples and log q of a window are large, and only the drafter reads them.
        self._entries.append((shape, images, replace(verdict, samples=None, log_q=None), start))

    def forget(self) -> None:
        """Drop what was recorded and not added."""
        self._entries.clear()

    def add(self) -> None:
        """Add the recorded steps to the sums."""
        groups: dict[tuple[int, int | None, int], list[tuple[TreeShape, slice, Verdict, Tensor]]] = {}
        for entry in self._entries:
            groups.setdefault((id(entry[0]), entry[1].start, len(entry[3])), []).append(entry)
        for entries in groups.values():
            self._add(*entries[0][:2], [entry[2:] for entry in entries])
        self._entries.clear()

    def _add(self, shape: TreeShape, images: slice, entries: list[tuple[Verdict, Tensor]]) -> None:
        """Add all steps in which the tree had this shape, for these images of the batch."""

        def stack(values: Sequence[Tensor]) -> Tensor:
            return torch.stack(list(values))[:, images]

        path = stack([verdict.path for verdict, _ in entries])
        length = stack([verdict.length for verdict, _ in entries])[..., None]
        start = stack([start for _, start in entries])[..., None]
        steps = torch.arange(path.shape[-1] + 1, device=path.device)
        is_inside = start + steps < self.tokens
        is_committed = is_inside & (steps <= length)
        is_accepted = (is_inside & (steps < length))[..., :-1]
        visited = torch.nn.functional.pad(path, (1, 0))
        inner = shape.has_children[images] if shape.parents.ndim == 2 else shape.has_children
        can_descend = inner.expand(*visited.shape[:2], -1).gather(-1, visited)
        self.steps.add_(is_inside[..., 0].sum(0))
        self.accepted[:, : path.shape[-1]].add_(is_accepted.sum(0))
        self.reached[:, : path.shape[-1]].add_((is_committed & can_descend)[..., :-1].sum(0))
        costs = [verdict.cost for verdict, _ in entries if verdict.cost is not None]
        if not costs:
            return
        relaxed = torch.where(is_accepted, stack([cost.relaxed for cost in costs]), 0.0)
        self.relaxed.add_(relaxed.double().sum((0, 2)))
        kept = torch.where(is_committed, stack([cost.total_variation for cost in costs]), 0.0)
        self.variation.add_(kept.double().sum((0, 2)))
        torch.maximum(self.largest, kept.amax((0, 2)), out=self.largest)
        if costs[0].bound is not None:
            self.is_bounded = True
            self.excess.add_((kept - costs[0].bound).clamp(min=0.0).double().sum((0, 2)))
        moved = [cost.latent_distance for cost in costs if cost.latent_distance is not None]
        if moved:
            self.has_distance = True
            self.distance.add_(torch.where(is_committed, stack(moved), 0.0).double().sum((0, 2)))


def totals(logits: Float[Tensor, "b r n v"], where: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, " b"]:
    """Return the sums of each image's logits, at all nodes or at those of `where`.

    NaN and infinity carry over to the sum, and from there to the sum over all steps.
    """
    return logits.sum((1, 2, 3)) if where is None else torch.where(where, logits.sum((1, 3)), 0.0).sum(1)


def write_tokens(
    grid: Int[Tensor, "b t"],
    total: Float[Tensor, " b"],
    logits: Float[Tensor, "b r n v"],
    places: Int[Tensor, "b n"],
    tokens: Int[Tensor, "b n"],
) -> None:
    """Write sampled tokens to their places of the grids, and add the sums of the logits they were sampled from."""
    grid.scatter_(1, places, tokens)
    total.add_(totals(logits))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an interval that holds the median of what the values are samples of, with a probability of at
    least 95 %: two of the values, by the binomial distribution. Of fewer than 6 the extremes, which hold it less often.
    """
    ordered, size = sorted(values), len(values)
    counts = (lgamma(size + 1) - lgamma(k + 1) - lgamma(size - k + 1) - size * log(2) for k in range(size))
    rank = len(list(takewhile(lambda tail: tail <= 0.025, accumulate(map(exp, counts)))))
    return ordered[max(rank - 1, 0)], ordered[size - max(rank, 1)]


def now(device: torch.device) -> float:
    """Return the time in seconds after all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync
    return time.perf_counter()


def run_times(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Return the seconds that each of `count` runs takes on a device."""
    seconds = []
    for _ in range(count):
        begun = now(device)
        run()
        seconds.append(now(device) - begun)
    return seconds


class Stopwatch:
    """Adds up the seconds between laps by phase. If it is off it does nothing, and the host does not wait."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device, self.is_on = device, is_on
        self.seconds: dict[str, float] = {}
        self._last = now(device) if is_on else 0.0

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        if self.is_on:
            last, self._last = self._last, now(self._device)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._last - last

    def move(self, phase: str, to: str, seconds: float) -> None:
        """Count some seconds of a phase as another's."""
        if self.is_on:
            self.seconds[phase] -= seconds
            self.seconds[to] = self.seconds.get(to, 0.0) + seconds


class Readback:
    """Reads a small number on the host. A GPU runs one step ahead and never waits for the host.

    On a GPU the number is copied asynchronously: `read` returns that of the previous call, None at the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._posted: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, values: Int[Tensor, " b"]) -> int | None:
        """Return the smallest of some numbers."""
        if not self._is_cuda:
            return int(values.min())  # sync
        last, place = self._posted, torch.empty((), dtype=values.dtype, pin_memory=True)
        place.copy_(values.min(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = place, event
        if last is None:
            return None
        last[1].synchronize()  # sync with the step before the last
        return int(last[0])
