"""Rounds write in place: what a step reported stays as it was."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lantern.core.types import Step
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

# a method of each family of drafters, and those whose states are not `State`
NAMES = [
    *("plain", "zipar", "eagle1", "eagle1-rejection", "eagle3", "poss", "vispec", "fr-spec", "eagle2", "ddd"),
    *("eagle2-rejection", "gumbel-jacobi", "sjd", "sjd-pac", "bounded-window", "lantern", "medusa", "parallelspec"),
    *("vertical", "sam", "sam-eagle1", "self-cascade", "specmquant"),
]


def reported(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a step with their names."""
    fields = {"step": step, "tree": step.tree, "shape": step.tree and step.tree.shape, "verdict": step.verdict}
    for owner, value in fields.items():
        for name, entry in vars(value).items() if value is not None else ():
            if isinstance(entry, Tensor):
                yield f"{owner}.{name}", entry


@pytest.mark.parametrize("name", NAMES)
def test_later_steps_leave_what_a_step_reported(name: str) -> None:
    seen = list[tuple[Step, dict[str, Tensor]]]()
    tiny_decoder(name).generate(
        CONDITION,
        keys=KEYS,
        callback=lambda step: seen.append((step, {name: entry.clone() for name, entry in reported(step)})),
    )
    assert len(seen) > 2 and "step.tokens" in seen[1][1]
    for step, before in seen:
        changed = [name for name, entry in reported(step) if not torch.equal(entry, before[name])]
        assert changed == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("plain", "zipar")])
def test_a_step_reports_the_tree_that_was_verified(name: str) -> None:
    """The tokens of a step are those of its tree's path, and the one behind it."""
    steps = list[Step]()
    made = tiny_decoder(name).generate(CONDITION, keys=KEYS, callback=steps.append)
    for step in steps[1:]:
        assert step.tree is not None and step.verdict is not None
        for image, (start, length) in enumerate(zip(step.start.tolist(), step.verdict.length.tolist(), strict=True)):
            path, known = (
                [0, *step.verdict.path[image, :length].tolist()],
                made.tokens[image, start - 1 : start + length],
            )
            assert start == 16 or torch.equal(step.tree.tokens[image, path][: len(known)], known)
