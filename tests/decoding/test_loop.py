"""The loop with EAGLE-1 beside the matrix of tests/methods: class labels, half precision and a GPU."""

from typing import Any

import pytest
import torch

from lantern.core.types import Condition, Generation, Step
from lantern.decoding import plain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from tests.methods.test_contracts import SAMPLED, parts
from tests.tiny import select, tiny_eagle, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, generate


def decode(target: Transformer, module: Eagle, **how: Any) -> Generation:
    drafter = EagleDrafter(module, target, tree=named("narrow_10"), mode="gumbel", sampling=SAMPLING)
    return generate(drafter, target=target, **how)


@pytest.mark.parametrize("form", ["guided", "rows"])
def test_class_labels_are_a_condition(form: str) -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    how: dict[str, Any] = {"condition": Condition(labels=torch.tensor([0, 2])), "keys": [(5, 0), (5, 1)]}
    made = decode(target, tiny_eagle(target, form=form), **how)
    expected = plain.generate(target, sampling=SAMPLING, **how).tokens
    assert torch.equal(made.tokens, expected) and not torch.equal(expected[0], expected[1])


@pytest.mark.gpu
def test_cuda_gives_the_same_tokens() -> None:
    target = tiny_target().cuda()
    made = decode(target, tiny_eagle(target).cuda())
    assert torch.equal(made.tokens.cpu(), decode(TARGET, tiny_eagle(TARGET)).tokens)


READERS = "eagle1 eagle2 eagle3 fr-spec medusa parallelspec poss sam sam-eagle1 self-cascade specmquant vertical vispec"
IN_ROWS = ("eagle1", "eagle2", "fr-spec", "sam-eagle1", "specmquant")  # their drafter has two forms


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "guided") for name in READERS.split()), *((name, "rows") for name in IN_ROWS)]
)
def test_a_drafter_reads_kept_tokens_as_it_reads_committed_ones(name: str, form: str) -> None:
    """The tree below kept tokens is the one of a generation in which these tokens were sampled."""
    steps, built = list[Step](), parts(name, SAMPLED, form)
    how: dict[str, Any] = {"keys": KEYS[:1], "callback": steps.append}
    condition = select(CONDITION, [0])
    tokens = built.generate(condition, **how).tokens
    trees = {int(step.start): step.tree for step in steps[1:] if 2 <= step.start < 15}
    assert len(trees) > 2
    for known, tree in [*trees.items()][::2]:
        steps.clear()
        forced = torch.where(torch.arange(16) < known, tokens, -1)
        assert torch.equal(built.generate(condition, forced=forced, **how).tokens, tokens)
        found = steps[1].tree
        assert int(steps[1].start) == known and tree is not None and found is not None
        assert torch.equal(found.tokens, tree.tokens)


def test_forced_tokens_are_checked() -> None:
    for wrong, message in (
        (torch.zeros(3, 15, dtype=torch.long), r"shape \[3, 15\], wanted \[3, 16\]"),
        (torch.full((3, 16), 24), r"from 24 to 24, wanted -1 \(free\) to 23"),
        (torch.full((3, 16), -2), "from -2 to -2"),
    ):
        with pytest.raises(ValueError, match=message):
            parts("plain", SAMPLED).generate(CONDITION, keys=KEYS, forced=wrong)
