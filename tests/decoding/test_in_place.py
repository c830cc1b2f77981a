"""Rounds write in place: what a step reported stays as it was."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lantern.core.types import Step
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

# a method of each family of drafters, and those whose states are not `State`
NAMES = [
    *("plain", "zipar", "eagle1", "eagle1-rejection", "eagle3", "poss", "vispec", "eagle2", "ddd", "eagle2-rejection"),
    *("gumbel-jacobi", "sjd", "sjd-pac", "bounded-window", "lantern", "medusa", "parallelspec", "vertical", "sam"),
    *("self-cascade", "specmquant", "eagle1-traversal", "repeat-above"),
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
