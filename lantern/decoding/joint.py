"""Decoding of generations that begin and end at different times, with joined passes of the target.

Each generation has a drafter, a verifier, noise and a sampling of its own. Only the pass over their trees is shared.
Generations whose whole steps an engine runs itself (`Engine.fused_decoder`) share those.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor

from lantern.core.types import (
    DrafterDefaults,
    DraftMode,
    DraftTree,
    Generation,
    Kept,
    NoiseSource,
    Prefill,
    Scores,
    Step,
    TreeShape,
)
from lantern.decoding.cache import StaticCache
from lantern.decoding.forced import PassScores
from lantern.decoding.loop import DraftedStepper, Inputs
from lantern.engines.prepared import original


class Together(Protocol):
    """Takes the steps of some generations, whose caches are views of `cache`."""

    cache: StaticCache

    def step(self, patience: float = 0.0) -> None:
        """Take a step of each generation; an engine that runs whole steps may take them for `patience` seconds."""
        ...


class RowStepper(Protocol):
    """A generation whose steps `Joint` takes, with those of others of its group."""

    @property
    def group(self) -> Hashable:
        """What generations that share passes have in common."""
        ...

    def together(self, steppers: Sequence[Any], earlier: StaticCache | None) -> Together:
        """Return what takes the steps of generations of this group; `earlier` is for `StaticCache.joined`."""
        ...

    def is_done(self) -> bool:
        """Return whether all codes are known."""
        ...

    def last(self) -> Step:
        """Return the last step."""
        ...

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """Return the finished codes with the statistics of the generation."""
        ...


class Joint:
    """Takes a step of each of some generations at a time; which ones may change between steps.

    What generations of one group share is made anew when they change; one that has left cannot come back. Up to
    rounding, as in any batch, a generation does not depend on the others.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[list[RowStepper], Together]] = {}

    @torch.no_grad()
    def step(self, steppers: Sequence[RowStepper], patience: float = 0.0) -> None:
        """Take a step of each generation, or steps for `patience` seconds until one is done (`Together.step`)."""
        groups: dict[Hashable, list[RowStepper]] = {}
        for stepper in steppers:
            groups.setdefault(stepper.group, []).append(stepper)
        self._groups = {group: known for group, known in self._groups.items() if group in groups}
        for group, members in groups.items():
            earlier, known = self._groups.get(group, ([], None))
            if known is None or {id(one) for one in earlier} != {id(one) for one in members}:
                placed = in_their_places(members, earlier)
                known = members[0].together(placed, None if known is None else known.cache)
                self._groups[group] = placed, known
            known.step(patience if len(groups) == 1 else 0.0)


def in_their_places(members: Sequence[RowStepper], earlier: Sequence[RowStepper]) -> list[RowStepper]:
    """Return the members in an order in which those of the first `len(members)` of `earlier` keep their places."""
    kept, present = earlier[: len(members)], {id(one) for one in members}
    keeps = {id(one) for one in kept} & present
    others = iter([one for one in members if id(one) not in keeps])
    return [one if id(one) in keeps else next(others) for one in kept] + list(others)


class DraftedRow:
    """A generation by the decoding loop, whose passes of the target are joined with those of others."""

    def __init__(self, stepper: DraftedStepper) -> None:
        self.stepper, self._last = stepper, stepper.step

    @property
    def group(self) -> tuple[object, ...]:
        """What generations that share passes have in common: the target, the form of their caches, and taps."""
        run, target = self.stepper.run, self.stepper.target
        return (id(original(target)), target.__class__, run.cache.form, run.taps)

    @staticmethod
    def together(steppers: "Sequence[DraftedRow]", earlier: StaticCache | None) -> "JoinedPass":
        """Return what takes the steps of generations of one group; `earlier` is for `StaticCache.joined`."""
        return JoinedPass(steppers, earlier)

    def finish(self, tree: DraftTree, inputs: Inputs, scores: Scores) -> None:
        """Complete a step by the scores of its pass."""
        self._last = self.stepper.record_step(self.stepper.finish(tree, inputs, scores))

    def is_done(self) -> bool:
        """Return whether all codes are known."""
        return self.stepper.run.is_done()

    def last(self) -> Step:
        """Return the last step."""
        assert self._last is not None
        return self._last

    def generation(self, steps: list[Step], seconds: dict[str, float]) -> Generation:
        """Return the finished codes with the statistics of the generation."""
        return self.stepper.run.generation(steps, seconds)


class JoinedPass:
    """The pass over the trees of some generations, each with a part of it; trees are padded to the largest one."""

    def __init__(self, rows: Sequence[DraftedRow], earlier: StaticCache | None) -> None:
        self._rows, self.cache = rows, StaticCache.joined([row.stepper.run.cache for row in rows], earlier)

    def step(self, patience: float = 0.0) -> None:
        """Take a step of each generation."""
        prepared = [row.stepper.prepare() for row in self._rows]
        parts = [inputs for _, inputs in prepared]
        found = split(join(parts, self.cache).scores(self._rows[0].stepper.target), parts)
        for row, (tree, inputs), scores in zip(self._rows, prepared, found, strict=True):
            row.finish(tree, inputs, scores)


def join(parts: Sequence[Inputs], cache: StaticCache) -> Inputs:
    """Return one pass for several, whose caches are views of `cache`. Trees are padded with copies of the last node.

    No node sees the padding. Slots are those of the largest tree, since slot i is for node i.
    """
    nodes = max(part.positions.shape[1] for part in parts)
    widest = next(part.slots for part in parts if part.slots.shape[1] == nodes)
    positions = torch.cat([pad(part.positions, nodes) for part in parts])
    return Inputs(
        torch.cat([pad(part.inputs, nodes) for part in parts]),
        positions,
        torch.cat([pad(part.mask, nodes) for part in parts]),
        cache,
        widest[:1].expand(len(positions), -1),
        torch.cat([pad(part.places, nodes) for part in parts]),
        parts[0].taps,
    )


def pad(x: Shaped[Tensor, "rows n *rest"], nodes: int) -> Shaped[Tensor, "rows m *rest"]:
    """Repeat the last node until there are `nodes`."""
    missing = nodes - x.shape[1]
    return torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], 1) if missing else x


def split(scores: Scores, parts: Sequence[Inputs]) -> list[Scores]:
    """Return the scores of each part of a joined pass, without padding."""
    made, row, fused = list[Scores](), 0, scores.fused
    for part in parts:
        rows, nodes = slice(row, row := row + len(part.positions)), part.positions.shape[1]
        own = None if fused is None else fused[rows, :nodes]
        made.append(PassScores(scores.logits[rows, :nodes], scores.features[rows, :nodes], own))
    return made


class NoDrafts(DrafterDefaults):
    """A drafter of trees without drafts: with Gumbel match a step is one of plain decoding.

    Plain decoding itself writes keys and values to the slots of their codes, which generations that began at different
    times do not have in common.
    """

    mode: DraftMode = "point"
    needs_whole_prefix, max_nodes, depth, reads_kept = False, 1, 0, True

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Read the first code."""
        self._last = prefill.first[:, None]
        root = torch.zeros_like(prefill.first[:1])
        self._shape = TreeShape(root, root, root, torch.ones_like(root, dtype=torch.bool)[None], ())

    def read_kept(self, kept: Kept) -> None:
        """Read the last of these codes."""
        self._last = kept.codes[:, -1:]

    def propose(self) -> DraftTree:
        """Return the last code."""
        return DraftTree(self._last, self._shape, self.mode)

    def observe(self, step: Step) -> None:
        """Read the codes of a step."""
        self._last = step.codes.gather(1, (step.counts - 1).clamp(min=0)[:, None])
