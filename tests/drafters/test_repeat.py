from typing import Any, Literal

import pytest
import torch

from lantern.drafters.lookup.repeat import RepeatDrafter
from tests.tiny_decoder import TARGET, generate, plain_tokens


@pytest.mark.parametrize(("side", "distance"), [("left", 1), ("above", 4)])
@pytest.mark.parametrize("length", [1, 3, 6, 16, 40])
def test_each_token_repeats_its_neighbour(side: Literal["left", "above"], distance: int, length: int) -> None:
    made = generate(RepeatDrafter(TARGET, side=side, length=length), keep_history=True)
    assert torch.equal(made.tokens, plain_tokens())
    seen = 0
    for step in made.history[1:]:
        assert step.tree is not None and step.tree.shape.depth == min(length, 16)
        for image, start in enumerate(step.start.tolist()):
            row: list[Any] = made.tokens[image, :start].tolist()  # with the drafts behind it
            for draft in step.tree.tokens[image, 1:].tolist():
                wanted = len(row) - distance if len(row) >= distance else start - 1
                assert draft == row[wanted]
                row.append(draft)
                seen += 1
    assert seen > 0


def test_a_bad_side_or_length_is_refused() -> None:
    with pytest.raises(ValueError, match='side is "below", wanted left or above'):
        RepeatDrafter(TARGET, side="below", length=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length is 0, wanted at least 1"):
        RepeatDrafter(TARGET, side="left", length=0)
