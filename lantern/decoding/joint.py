"""Decoding of generations that begin and end at different times, with joined passes of the target.

Each generation has a drafter, a verifier, noise and a sampling of its own. Only the pass over their trees is shared.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from lantern.core.types import DrafterDefaults, DraftMode, DraftTree, NoiseSource, Prefill, Scores, Step, TreeShape
from lantern.decoding.cache import StaticCache
from lantern.decoding.forced import PassScores
from lantern.decoding.loop import DraftedStepper, Inputs
from lantern.engines.prepared import original


class Joint:
    """Takes a step of each of some generations at a time; which ones may change between steps.

    A pass has one part per generation, the trees padded to the largest one. Generations share a pass if they have one
    target and caches of one form. Their caches become views of a joined one, which is made anew when the generations
    change. Up to rounding, as in any batch, a generation does not depend on the others.
    """

    def __init__(self) -> None:
        self._joined: dict[object, tuple[list[StaticCache], StaticCache]] = {}

    @torch.no_grad()
    def step(self, steppers: Sequence[DraftedStepper]) -> list[Step]:
        """Take a step of each generation."""
        prepared = [stepper.prepare() for stepper in steppers]
        groups: dict[object, list[int]] = {}
        for number, (stepper, (_, inputs)) in enumerate(zip(steppers, prepared, strict=True)):
            key = (id(original(stepper.target)), stepper.target.__class__, inputs.cache.form, inputs.taps)
            groups.setdefault(key, []).append(number)
        self._joined = {key: joined for key, joined in self._joined.items() if key in groups}
        scores: dict[int, Scores] = {}
        for key, numbers in groups.items():
            parts = [prepared[number][1] for number in numbers]
            found = join(parts, self._cache(key, [part.cache for part in parts])).scores(steppers[numbers[0]].target)
            scores |= zip(numbers, split(found, parts), strict=True)
        made = []
        for number, (stepper, (tree, inputs)) in enumerate(zip(steppers, prepared, strict=True)):
            made.append(stepper.record_step(stepper.finish(tree, inputs, scores[number])))
        return made

    def _cache(self, key: object, parts: list[StaticCache]) -> StaticCache:
        known = self._joined.get(key)
        if known is None or [id(part) for part in known[0]] != [id(part) for part in parts]:
            self._joined[key] = known = parts, StaticCache.joined(parts)
        return known[1]


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
    needs_whole_prefix, max_nodes, depth = False, 1, 0

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Read the first code."""
        self._last = prefill.first[:, None]
        root = torch.zeros_like(prefill.first[:1])
        self._shape = TreeShape(root, root, root, torch.ones_like(root, dtype=torch.bool)[None], ())

    def propose(self) -> DraftTree:
        """Return the last code."""
        return DraftTree(self._last, self._shape, self.mode)

    def observe(self, step: Step) -> None:
        """Read the codes of a step."""
        self._last = step.codes.gather(1, (step.counts - 1).clamp(min=0)[:, None])
