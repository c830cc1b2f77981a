"""Statistics of a generation, NaN flags, phase timers and the report of steps.

Counters and flags stay on the device. The host reads them once, at the end.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import Callback, Step, TreeShape, Verdict


@dataclass(frozen=True)
class Totals:
    """Sums over all steps of each image; the fields are those of `Generation`."""

    passes: Int[Tensor, " b"]
    accepted: Int[Tensor, "b d"]
    reached: Int[Tensor, "b d"]
    relaxed: Float[Tensor, " b"]
    total_variation: Float[Tensor, " b"]
    total_variation_max: Float[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None


class Counters:
    """Keeps the verdicts of all steps, a few numbers each. Statistics are computed once, at the end.

    Codes past the end of the picture are not counted.
    """

    def __init__(self, codes: int) -> None:
        self._codes = codes
        self._entries: list[tuple[TreeShape, Verdict, Tensor]] = []

    def enter(self, shape: TreeShape, verdict: Verdict, start: Int[Tensor, " b"]) -> None:
        """Record a step whose first new code is number `start` of its image."""
        self._entries.append((shape, verdict, start))

    def totals(self, images: int, depth: int, device: torch.device) -> Totals:
        """Return the sums over all steps. The pass over the prompt is counted too."""
        zeros = torch.zeros(images, depth, dtype=torch.long, device=device)
        sums = torch.zeros(4, images, device=device)
        is_measured = all(verdict.latent_distance is not None for _, verdict, _ in self._entries)
        distance = sums[3] if is_measured else None
        totals = Totals(zeros.new_ones(images), zeros, zeros.clone(), sums[0], sums[1], sums[2], distance)
        shapes = {id(shape): shape for shape, _, _ in self._entries}
        for name, shape in shapes.items():
            self._add(totals, shape, [entry[1:] for entry in self._entries if id(entry[0]) == name])
        return totals

    def _add(self, totals: Totals, shape: TreeShape, entries: list[tuple[Verdict, Tensor]]) -> None:
        """Add all steps in which the tree had this shape."""
        path = torch.stack([verdict.path for verdict, _ in entries])
        length = torch.stack([verdict.length for verdict, _ in entries])[..., None]
        start = torch.stack([start for _, start in entries])[..., None]
        steps = torch.arange(path.shape[-1] + 1, device=path.device)
        is_inside = start + steps < self._codes
        is_committed = is_inside & (steps <= length)
        is_accepted = (is_inside & (steps < length))[..., :-1]
        visited = torch.nn.functional.pad(path, (1, 0))
        can_descend = shape.has_children.expand(*visited.shape[:2], -1).gather(-1, visited)
        totals.passes.add_(is_inside[..., 0].sum(0))
        totals.accepted[:, : path.shape[-1]].add_(is_accepted.sum(0))
        totals.reached[:, : path.shape[-1]].add_((is_committed & can_descend)[..., :-1].sum(0))
        relaxed = [verdict.relaxed for verdict, _ in entries if verdict.relaxed is not None]
        if relaxed:
            totals.relaxed.add_(torch.where(is_accepted, torch.stack(relaxed), 0.0).sum((0, 2)))
        spent = [verdict.total_variation for verdict, _ in entries if verdict.total_variation is not None]
        if spent:
            kept = torch.where(is_committed, torch.stack(spent), 0.0)
            totals.total_variation.add_(kept.sum((0, 2)))
            torch.maximum(totals.total_variation_max, kept.amax((0, 2)), out=totals.total_variation_max)
        moved = [verdict.latent_distance for verdict, _ in entries if verdict.latent_distance is not None]
        if moved and totals.latent_distance is not None:
            totals.latent_distance.add_(torch.where(is_committed, torch.stack(moved), 0.0).sum((0, 2)))


class FiniteSoFar:
    """One flag per image: whether all logits that its codes were sampled from are finite, in both guidance rows.

    Each row of logits is summed, since NaN and infinity carry over to the sum. Logits whose sum overflows count as
    infinite. `flags` stays on the device and is updated in place, so that `look` can be compiled and captured.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self.flags: Bool[Tensor, " b"] = torch.ones(images, dtype=torch.bool, device=device)

    def look(
        self,
        logits: Float[Tensor, "b r n v"],
        *,
        nodes: Int[Tensor, "b m"] | None = None,
        unused: Bool[Tensor, "b k"] | None = None,
    ) -> None:
        """Check the logits after `nodes` (None: all n), except the `unused` ones, from which no code was sampled."""
        sums = logits.sum((1, 3))
        is_finite = sums - sums == 0
        if nodes is not None:
            is_finite = is_finite.gather(1, nodes)
        if unused is not None:
            is_finite = is_finite | unused
        self.flags.logical_and_(is_finite.all(1))


class Stopwatch:
    """Adds up the seconds between laps by phase. If it is off it does nothing, and the host does not wait."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._is_cuda = device.type == "cuda"
        self._is_on = is_on
        self.seconds: dict[str, float] = {}
        self._last = self._now() if is_on else 0.0

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        if not self._is_on:
            return
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore laps within the context, for work that must not wait. The next lap includes its time."""
        was_on, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = was_on

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()  # sync
        return time.perf_counter()


def report(step: Step, callback: Callback | None, steps: list[Step] | None) -> None:
    """Pass a step to the callback, and append it to `steps` without its large parts: scores and leftovers."""
    if callback is not None:
        callback(step)
    if steps is not None:
        verdict = None if step.verdict is None else replace(step.verdict, leftovers=None)
        steps.append(replace(step, scores=None, codes=step.codes.clone(), verdict=verdict))
