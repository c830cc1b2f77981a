"""The account of a generation, kept on the device and added up at its end."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.types import TreeShape, Verdict


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


class Ledger:
    """Remembers the verdicts of all steps, a few numbers each, so that a step computes no statistics.

    Codes past the end of the picture are not counted.
    """

    def __init__(self, codes: int) -> None:
        self._codes = codes
        self._entries: list[tuple[TreeShape, Verdict, Tensor]] = []

    def enter(self, shape: TreeShape, verdict: Verdict, start: Int[Tensor, " b"]) -> None:
        """Books a step whose first new code is number `start` of its image."""
        self._entries.append((shape, verdict, start))

    def totals(self, images: int, depth: int, device: torch.device) -> Totals:
        """Adds up; the pass over the prompt is counted too."""
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
        """Adds the steps in which the tree had this shape, all at once."""
        path = torch.stack([verdict.path for verdict, _ in entries])
        length = torch.stack([verdict.length for verdict, _ in entries])[..., None]
        start = torch.stack([start for _, start in entries])[..., None]
        steps = torch.arange(path.shape[-1] + 1, device=path.device)
        is_inside = start + steps < self._codes
        is_committed = is_inside & (steps <= length)
        is_accepted = (is_inside & (steps < length))[..., :-1]
        visited = torch.nn.functional.pad(path, (1, 0))
        can_descend = has_children(shape).expand(*visited.shape[:2], -1).gather(-1, visited)
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


def has_children(shape: TreeShape) -> Bool[Tensor, "*b n"]:
    """Which nodes are no leaves."""
    nodes = torch.zeros_like(shape.parents, dtype=torch.bool)
    return nodes.scatter(-1, shape.parents[..., 1:], True)
